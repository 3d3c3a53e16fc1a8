//! Faults of a worker on purpose. Only a build with the feature `faults`, which tests turn on, has them: in any other
//! build each hook does nothing.

#[cfg(feature = "faults")]
mod faults;
#[cfg(not(feature = "faults"))]
mod none;

#[cfg(feature = "faults")]
pub use faults::Inject;
#[cfg(not(feature = "faults"))]
pub use none::Inject;
