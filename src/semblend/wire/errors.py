"""A mistake as the client sees it: a status, and OpenAI's error object with a hint in it."""

from __future__ import annotations

from semblend.confirm.receipt import JsonObject
from semblend.errors import CapacityError, InputError, SemBlendError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(SemBlendError):
    """An answer with a status other than 200.

    >>> ApiError(404, "no model 'x'", hint="ask for 'y'", param="model", code="model_not_found").body()["error"]["code"]
    'model_not_found'
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        hint: str = "",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> JsonObject:
        """OpenAI's shape; ``message`` holds the hint too, because that is the field that clients print."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code, "hint": self.hint}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def as_api_error(error: Exception) -> ApiError:
    """What a client may know of an error: ours keep their words, a stranger's inside stays inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CapacityError):
        return ApiError(503, error.message, hint=error.hint or "try again later", code="out_of_room", retry_after_s=1)
    if isinstance(error, InputError):
        return ApiError(400, error.message, hint=error.hint)
    if isinstance(error, SemBlendError):
        return ApiError(500, error.message, hint=error.hint)
    return ApiError(500, "the server failed on this request", hint="the server's log has the reason; try again")
