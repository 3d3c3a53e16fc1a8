//! Tensors by Hugging Face name into a backend's layout.
