"""GET /: the playground, a static page that uses the public API; and the sound that its examples transcribe."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from triptych.model.pretrained import CHECKPOINTS
from triptych.service.core.errors import not_found
from triptych.service.http.file_replies import file_reply
from triptych.service.http.route_prefix import is_bare, prefix_of
from triptych.service.http.route_table import Reply, Routes
from triptych.service.http.static_pages import page
from triptych.service.planning.capabilities import SAMPLE

routes = Routes()
_SAMPLE = CHECKPOINTS / "speech" / SAMPLE


@routes.get(
    "/",
    "The playground",
    {
        200: Reply(
            "A page to try the models with; for programs, which do not ask for HTML, the line `Ollama is running`.",
            texts=("text/html", "text/plain"),
        ),
        307: Reply("Below a route prefix without its last slash: the page is there."),
    },
)
async def playground(request: Request) -> Response:
    """A page to select a model, generate with streaming, encode and compare. Browsers send the key as a password."""
    if is_bare(request.scope):  # the page's relative URLs need the slash
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"{prefix_of(request.scope)}/{query}")
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})
    return page("playground")


@routes.get(
    f"/{SAMPLE}", "A sound to transcribe", {200: Reply("A sentence.", texts=("audio/flac",))}, errors=(404, 416)
)
async def sample(request: Request) -> Response:
    """Returns a short recording in English, for examples. 404 if the embedded models are not installed."""
    try:
        found = _SAMPLE.stat()
    except OSError:
        raise not_found(f"{SAMPLE} is not installed: the package has no embedded models") from None
    return file_reply(request, _SAMPLE, found, "audio/flac")
