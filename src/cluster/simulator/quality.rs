//! How well work is shared out.
