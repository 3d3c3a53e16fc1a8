//! What a model is, out of Hugging Face's config.json in either dialect.
