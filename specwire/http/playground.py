"""The playground's files as answers. The page uses this process's API as any client does, and `/specwire/status`."""

import hashlib
from importlib import resources

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_INDEX = "index.html"
# The page loads and calls nothing elsewhere, runs no script but its own files, and shows in no frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Playground:
    """Serves the page at `/` and what it loads at `/page/NAME`; all is read at the start."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, dict[str, str]]] = {}
        for file in resources.files("specwire.http.page").iterdir():
            suffix = file.name[file.name.rfind(".") :]
            if suffix in _TYPES:
                content = file.read_bytes()
                self._files[file.name] = content, _headers(content, _TYPES[suffix])

    @property
    def names(self) -> tuple[str, ...]:
        """Of all files."""
        return tuple(sorted(self._files))

    def add_to(self, app: FastAPI) -> None:
        """Adds the paths, which are no part of the API's schema."""
        for path, answer in (("/", self._index), ("/page/{name}", self._file)):
            app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)

    async def _index(self, request: Request) -> Response:
        """The page."""
        return self._answer(request, _INDEX)

    async def _file(self, request: Request) -> Response:
        """What it loads."""
        return self._answer(request, request.path_params["name"])

    def _answer(self, request: Request, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404, "Not Found")
        content, headers = self._files[name]
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers={"etag": headers["etag"]})
        return Response(content, headers=headers)


def _headers(content: bytes, media_type: str) -> dict[str, str]:
    return {
        "content-type": f"{media_type}; charset=utf-8",
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }
