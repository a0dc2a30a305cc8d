"""The error tree, grouped by who can fix it, and what HTTP status each becomes.

    FirstlightError
    ├── ConfigError            the operator: a flag, a model file, a folder          (exit status 2)
    │   └── ModelError         the model file or folder is missing, corrupt or not supported
    ├── RequestError           the client: a field of the request                    (400)
    │   ├── UnsupportedParameter   a field that is known but not supported, or not known at all (400)
    │   ├── NotFoundError      model or request id that does not exist               (404)
    │   ├── PayloadTooLarge    body over the limit                                   (413)
    │   └── AuthError          missing or wrong key                                  (401)
    ├── OverloadedError        nobody: try again after `retry_after_s`               (429 / 503)
    └── BackendError           us: the core or a kernel failed                       (500)

Knows nothing of HTTP libraries: `status` is a number.
"""

from __future__ import annotations

__all__ = [
    "AuthError",
    "BackendError",
    "ConfigError",
    "DeadlineError",
    "FirstlightError",
    "ModelError",
    "NotFoundError",
    "OverloadedError",
    "PayloadTooLarge",
    "RequestError",
    "UnsupportedParameter",
]


class FirstlightError(Exception):
    """Base of every error that firstlight raises on purpose.

    Args:
        message: what was given, the limit and its unit, the field's name, then what to do.
        param: the field or option at fault, as the caller spelled it.
        hint: what to do next, where the message does not say it.
    """

    status: int = 500
    code: str = "internal_error"
    kind: str = "server_error"

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.hint = hint


class ConfigError(FirstlightError):
    """The operator can fix it: an option, a path, a file."""

    code = "config_error"


class ModelError(ConfigError):
    """The model file is missing, truncated, corrupt or of a kind that is not supported."""

    code = "model_error"


class RequestError(FirstlightError):
    """The client can fix it: 4xx in OpenAI's error form."""

    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class UnsupportedParameter(RequestError):
    """A field of the request that is not known, or known and not supported."""

    code = "unsupported_parameter"


class NotFoundError(RequestError):
    """A model, route or request id that does not exist."""

    status = 404
    code = "not_found"


class PayloadTooLarge(RequestError):
    """The body is larger than the server takes."""

    status = 413
    code = "payload_too_large"


class AuthError(RequestError):
    """The key is missing or wrong."""

    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class OverloadedError(FirstlightError):
    """Try again after `retry_after_s` seconds."""

    status = 429
    code = "overloaded"
    kind = "overloaded_error"

    def __init__(self, message: str, *, retry_after_s: float, status: int = 429) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = status


class DeadlineError(FirstlightError):
    """The request waited longer than its own deadline and was dropped before any of it was computed."""

    status = 408
    code = "deadline_exceeded"
    kind = "timeout_error"


class BackendError(FirstlightError):
    """Ours to fix: the core, a kernel or a worker failed."""

    code = "backend_error"
