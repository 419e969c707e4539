"""Log a browser in with the server's key, and out."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from runtime.frontend.errors import RequestError, overloaded
from runtime.server.page.context import PageContext
from runtime.server.page.links import HOME, LOGIN, own_page
from runtime.server.page.login_limit import LoginLimit
from runtime.server.page.rendering import HEADERS, Frame, explained, html
from runtime.server.page.sessions import SESSION_SECONDS, cookie_name
from runtime.server.request_body import read_body

#: Bytes of the form at most.
_FORM_BYTES = 8192


def _frame(login: Login) -> Frame:
    return Frame(serving=login.context.service is not None, login=False)


class Login:
    """The handlers of the login form. They are open: there is nothing behind them but the check of the key."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self._limit = LoginLimit()

    @explained(_frame)
    async def form(self, request: Request) -> Response:
        """The form that asks for the server's key."""
        if self.context.sessions is None:
            return _onward(HOME)
        return self._form(request.query_params.get("next", HOME))

    @explained(_frame)
    async def log_in(self, request: Request) -> Response:
        """Begin a session: the right key gives a cookie that stands for it, HttpOnly and SameSite=Strict."""
        sessions = self.context.sessions
        _refuse_other_sites(request)
        raw = (await read_body(request, _FORM_BYTES)).decode("utf-8", "replace")
        try:
            form = parse_qs(raw, max_num_fields=8)
        except ValueError:
            raise RequestError("The form has too many fields.") from None
        target = own_page(form.get("next", [HOME])[0])
        if sessions is None:
            return _onward(target)
        address = "" if request.client is None else request.client.host
        # From here on nothing is awaited: logins that come at once are counted one by one.
        if (wait := self._limit.wait_seconds(address)) is not None:
            raise overloaded(f"Too many wrong keys were tried. The next one is taken in {wait} s.", wait)
        session = sessions.begin(form.get("key", [""])[0])
        if session is None:
            self._limit.count_failure(address)
            return self._form(target, wrong=True)
        response = _onward(target)
        response.set_cookie(
            cookie_name(request.scope),
            session,
            max_age=SESSION_SECONDS,
            path="/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return response

    @explained(_frame)
    async def log_out(self, request: Request) -> Response:
        """End the session of the request's cookie."""
        _refuse_other_sites(request)
        if self.context.sessions is not None:
            self.context.sessions.end(request.scope)
        response = _onward(LOGIN)
        response.delete_cookie(cookie_name(request.scope), path="/", httponly=True, samesite="strict")
        return response

    def _form(self, target: str, wrong: bool = False) -> Response:
        return html("login.html", _frame(self), 401 if wrong else 200, target=own_page(target), wrong=wrong)


def _onward(target: str) -> Response:
    return RedirectResponse(target, 303, HEADERS)


def _refuse_other_sites(request: Request) -> None:
    """Raise RequestError 403 for a form that a page of another site sent."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise RequestError("This form was sent from another site.", status=403, code="other_site")
