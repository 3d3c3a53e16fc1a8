//! Errors in the form of OpenAI's interface.

use hyper::StatusCode;
use serde_json::{Value, json};
use std::fmt::Display;

/// Why a request is not answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Status of the response.
    pub status: StatusCode,
    message: String,
    /// The field of the request that is wrong.
    param: Option<&'static str>,
    code: Option<&'static str>,
}

impl Failure {
    /// A failure with this status.
    pub fn of(status: StatusCode, message: impl Display) -> Self {
        Failure { status, message: message.to_string(), param: None, code: None }
    }

    /// A field of the request that cannot be used.
    pub fn field(param: &'static str, message: impl Display) -> Self {
        Failure { param: Some(param), ..Failure::of(StatusCode::BAD_REQUEST, message) }
    }

    /// The same failure, with a code that clients know.
    pub fn coded(self, code: &'static str) -> Self {
        Failure { code: Some(code), ..self }
    }

    /// The server ends, or the text waited too long.
    pub fn closed() -> Self {
        Failure::of(StatusCode::SERVICE_UNAVAILABLE, "the server ends or is too busy: try again later")
    }

    /// The same failure, with another status.
    pub fn with(self, status: StatusCode) -> Self {
        Failure { status, ..self }
    }

    /// The body of the response.
    pub fn body(&self) -> Value {
        let kind = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let Failure { message, param, code, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}
