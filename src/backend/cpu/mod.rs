//! The CPU backend: the one that everyone has, and the reference for all others.
