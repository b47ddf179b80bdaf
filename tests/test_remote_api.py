"""The HTTP layer over an engine in another process: a chosen part of its tests, run through real pipes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

import server_driver
import test_api_beams
import test_api_completions
import test_api_errors
import test_api_lifecycle
import test_api_tools_http
from fake_engine import FakeEngine
from remote_app import RemoteApp
from server_driver import Api

CHOSEN = {
    test_api_beams: ("completions_answer_with_the_best_sequences",),
    test_api_completions: ("streamed_equals_whole", "prompt_logprobs", "scoring"),
    test_api_errors: (
        "a_salt_reaches_the_engine_from_every_endpoint", "embeddings_have_a_priority", "failure_before_the_first_token",
        "nan_embeddings_are_a_500_of_their_own", "not_ready", "one_failed_sample_ends_its_siblings",
    ),
    test_api_lifecycle: (
        "a_client_that_leaves_ends_its_request", "a_stream_that_has_begun_ends_as_length", "deadlines", "keys",
        "many_streams_at_once", "the_queue_is_bounded", "the_queued_tokens_are_bounded",
    ),
    test_api_tools_http: ("calls", "constraints_reach_the_engine", "responses"),
}  # fmt: skip
globals().update({f"test_{name}": getattr(module, f"test_{name}") for module, names in CHOSEN.items() for name in names})


@pytest.fixture(scope="module", autouse=True)
def remote() -> Iterator[None]:
    """All applications of this module's tests are remote ones."""
    context, made = zmq.Context(), []

    def create_app(engine: FakeEngine, config, glass: None = None) -> RemoteApp:
        made.append(RemoteApp(engine, config, context))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_driver, "create_app", create_app)
        yield
    for app in made:
        app.close()
    context.destroy(linger=0)


@pytest.fixture(scope="module")
def api(remote) -> Api:
    return Api(FakeEngine())


def test_a_process_that_has_not_heard_yet_that_the_model_is_loaded_asks(remote):
    """Another one may have told a client that the server is ready."""
    api = Api(FakeEngine())
    api.engine.state.loaded = False
    assert api.post("/v1/completions", {"prompt": "a"}).json()["error"]["code"] == "loading"
    api.app.tells, api.engine.state.loaded = False, True
    assert api.ok("/v1/completions", {"prompt": "a"})["choices"]
