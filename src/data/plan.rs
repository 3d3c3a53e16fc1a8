//! Which rows make up step s, and how they are packed into microbatches: a pure function of the rows'
//! lengths, the configuration and the seed. It knows nothing of workers.
