"""Token ids on their way in: checked and packed once, the same ids wherever they are read afterwards."""

import random
from array import array

import msgspec
import numpy as np
import pytest

from fake_engine import EOS, IM_END, ByteTokenizer
from headrace.engine.messages import EngineOutput, EngineRequest, RequestTimes
from headrace.engine.wire import Add, ToCore, from_wire, to_wire
from headrace.errors import ParameterError
from headrace.sampling.checks import checked_ids, packed
from headrace.sampling.params import SamplingParams
from headrace.scheduler.request import Request
from headrace.text.inputs import InputProcessor
from headrace.text.output import RequestMetrics, request_metrics
from headrace.text.stream import SampleStream

VOCAB = 1000


@pytest.mark.parametrize("kind", [list, tuple, packed])
def test_good_ids_come_back_packed(kind):
    for ids in ([], [0], [VOCAB - 1, 0, 5], list(range(VOCAB))):
        found = checked_ids(kind(ids), VOCAB)
        assert isinstance(found, array) and found.itemsize == 4 and found.tolist() == ids


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**31, -(2**31) - 1, 2**70, True, 1.0, "1", None, [1], np.int64(1)])
def test_the_first_wrong_id_is_named(wrong):
    with pytest.raises(ParameterError) as caught:
        checked_ids([1, 2, wrong, -7], VOCAB)
    assert (caught.value.field, repr(caught.value.value)) == ("prompt", repr(wrong)) and "[0, 999]" in str(caught.value)


def test_packed_ids_out_of_range_are_refused_too():
    with pytest.raises(ParameterError, match="1000"):
        checked_ids(packed([1, 1000]), VOCAB)


@pytest.mark.parametrize("kind", [list, packed])
def test_ids_travel_between_processes_as_they_are(kind):
    rng = random.Random(1)
    ids = [rng.randrange(2**31) for _ in range(500)]
    message = Add(EngineRequest("a", kind(ids), SamplingParams(), output_ids=[4]))
    data = msgspec.msgpack.Encoder(enc_hook=to_wire).encode(message)
    request = msgspec.msgpack.Decoder(ToCore, dec_hook=from_wire).decode(data).request
    assert request.prompt_ids.tolist() == ids and request.output_ids == [4]
    if kind is packed:
        assert len(data) < 4 * len(ids) + 200


@pytest.mark.parametrize("foreign", [np.arange(3), {1: object()}, 1j])
def test_what_no_message_can_hold_is_not_sent_as_something_else(foreign):
    with pytest.raises(NotImplementedError, match=r"a (ndarray|object|complex) does not travel"):
        msgspec.msgpack.Encoder(enc_hook=to_wire).encode(Add(EngineRequest("a", foreign, SamplingParams())))


def test_a_request_reads_its_ids_across_the_border_of_prompt_and_output():
    request = Request("a", [1, 2, 3], SamplingParams(), 0, output_ids=[4, 5])
    known = [1, 2, 3, 4, 5]
    assert request.known_ids().tolist() == known and request.prompt_ids.tolist() == [1, 2, 3]
    for start in range(6):
        for stop in range(start, 6):
            assert request.token_ids(start, stop) == known[start:stop]


def test_ids_without_a_token_are_refused():
    valid = np.arange(VOCAB) % 7 != 6
    assert checked_ids([0, 7, 999], VOCAB, valid=valid).tolist() == [0, 7, 999]
    with pytest.raises(ParameterError, match=r"prompt: got 13, .*\[0, 999\] .* token for"):
        checked_ids([5, 13, 6], VOCAB, valid=valid)
    with pytest.raises(ParameterError, match=r"prompt: got 1000, .*\[0, 999\]$"):
        checked_ids([6, 1000], VOCAB, valid=valid)


def test_a_prompt_that_makes_room_leaves_place_for_what_is_asked():
    """truncate_prompt_tokens -1: the end of the prompt that leaves room for max_tokens, or for one token."""
    inputs = InputProcessor(None, {}, (), VOCAB, 10)
    for max_tokens, kept in ((None, 9), (1, 9), (4, 6), (40, 1)):
        params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=max_tokens)
        assert inputs.prompt(list(range(50)), params).tolist() == list(range(50 - kept, 50))


def test_ids_beyond_the_model_are_neither_stops_nor_bad_words():
    """A tokenizer may have more tokens than the model has rows."""
    tokenizer = ByteTokenizer()
    inputs = InputProcessor(tokenizer, {}, (), IM_END, 100)  # type: ignore[arg-type]
    params = inputs.complete(SamplingParams(stop=["<|im_end|>", "<eos>"], bad_words=["ab", "<|im_end|>"]), 5)
    assert params.stop_token_ids == [EOS] and params.bad_word_ids == [list(b"ab"), list(b" ab")]


def test_ends_that_are_every_token_there_is_are_refused():
    """They failed as NaN logits, the server's own fault: rows without a token are no tokens either."""
    tokenizer = ByteTokenizer()
    inputs = InputProcessor(tokenizer, {}, (EOS,), VOCAB, 100)  # type: ignore[arg-type]
    every = [int(i) for i in np.flatnonzero(tokenizer.valid_ids(VOCAB)) if i != EOS]
    assert len(every) < VOCAB - 1
    with pytest.raises(ParameterError, match="min_tokens"):
        inputs.complete(SamplingParams(stop_token_ids=every, min_tokens=1), 3)
    for params in (SamplingParams(stop_token_ids=every[1:], min_tokens=1), SamplingParams(stop_token_ids=every)):
        assert inputs.complete(params, 3).eos_token_ids == [EOS]


def test_a_sample_keeps_what_only_some_news_say():
    stream = SampleStream(None, SamplingParams())
    stream.push(EngineOutput("a", [1], num_cached_tokens=7))
    stream.push(EngineOutput("a", [2, 3]))
    assert (stream.num_cached_tokens, stream.num_tokens, stream.done) == (7, 3, False)
    assert request_metrics(RequestTimes(1.0, 2.0, 5.0), 2) == RequestMetrics(1.0, 2.0, 3.0, 5.0)
    assert request_metrics(RequestTimes(1.0, 2.0, 5.0), 1) == RequestMetrics(1.0, 2.0, 0.0, 5.0)
