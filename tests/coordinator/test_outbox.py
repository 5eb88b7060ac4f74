"""The plain tokens of a session: straight into the next message, merged where a client reads slowly, never after a request's end."""

from coordinator.outbox import Outbox, SessionSink
from specwire.messages import ChoiceDelta, ErrorStatus, FinishReason, StreamDelta

MANY_BYTES = 1 << 20
PLAIN = b"\x01"


class Session:
    """An outbox and what the sinks of its requests announce."""

    def __init__(self) -> None:
        self.num_wakes = 0
        self.outbox = Outbox(self._wake)
        self.announced: list[SessionSink] = []

    def sink(self, stream_id: int, num_choices: int = 1) -> SessionSink:
        sink = SessionSink(stream_id, num_choices, self.outbox, lambda _: self.announced.append(sink))
        return sink

    def take(self, max_bytes: int = MANY_BYTES) -> list[StreamDelta]:
        return self.outbox.take(max_bytes)[0]

    def _wake(self) -> None:
        self.num_wakes += 1


def test_deltas_of_a_step_are_one_message() -> None:
    session = Session()
    first, second = session.sink(1), session.sink(2)
    first.delta(0, [5, 6], b"\x02\x03")
    second.delta(0, [7], PLAIN)
    assert session.num_wakes == 1
    assert session.take() == [StreamDelta(1, 0, [5, 6], b"\x02\x03"), StreamDelta(2, 0, [7], PLAIN)]
    assert session.take() == []
    second.delta(0, [8], PLAIN)
    assert session.num_wakes == 2
    assert session.take() == [StreamDelta(2, 0, [8], PLAIN)]
    assert not session.announced


def test_steps_that_the_client_did_not_read_are_merged_choice_by_choice() -> None:
    session = Session()
    pair, single = session.sink(1, num_choices=2), session.sink(2)
    tokens = [1, 2]
    pair.delta(0, tokens, b"\x02\x03")
    single.delta(0, [3], PLAIN)
    pair.delta(1, [4], PLAIN)
    pair.delta(0, [5], b"\x04")
    single.delta(0, [6, 7], b"\x02\x04")
    assert session.outbox.num_streams == 2
    assert session.take() == [
        StreamDelta(1, 0, [1, 2, 5], b"\x02\x03\x04"),
        StreamDelta(2, 0, [3, 6, 7], b"\x01\x02\x04"),
        StreamDelta(1, 1, [4], PLAIN),
    ]
    assert tokens == [1, 2], "what a caller handed over is not changed"


def test_a_message_holds_so_many_bytes_and_at_least_one_delta() -> None:
    session = Session()
    sinks = [session.sink(stream_id) for stream_id in range(4)]
    for sink in sinks:
        sink.delta(0, list(range(100)), bytes(100))
    _, size_of_two = Outbox.take(_filled(2), MANY_BYTES)
    assert [delta.stream_id for delta in session.take(size_of_two)] == [0, 1]
    sinks[3].delta(0, [100], PLAIN)
    assert [delta.stream_id for delta in session.take(1)] == [2]
    [last] = session.take(1)
    assert (last.stream_id, last.token_ids) == (3, list(range(101)))
    assert not session.outbox.deltas


def test_backlog_lasts_until_it_is_taken() -> None:
    session, calls = Session(), []
    sink, other = session.sink(1), session.sink(2)
    sink.notify_below(1, lambda: calls.append("at once"))
    sink.delta(0, [1, 2], bytes(2))
    sink.delta(0, [3], bytes(1))
    other.delta(0, [1], bytes(1))
    assert (sink.num_backlog_tokens, other.num_backlog_tokens) == (3, 1)
    sink.notify_below(3, lambda: calls.append("taken"))
    assert calls == ["at once"]
    session.take()
    assert (sink.num_backlog_tokens, other.num_backlog_tokens) == (0, 0)
    assert calls == ["at once", "taken"]
    session.take()
    assert calls == ["at once", "taken"]


def test_text_and_ends_go_beside_and_keep_the_order() -> None:
    session, calls = Session(), []
    sink = session.sink(1, num_choices=2)
    sink.delta(0, [1], PLAIN)
    sink.choice(ChoiceDelta(0, [2], PLAIN, finish_reason=FinishReason.LENGTH))
    sink.delta(1, [3], PLAIN)
    assert session.announced == [sink]
    assert sink.num_backlog_tokens == 3
    assert session.take() == [StreamDelta(1, 0, [1], PLAIN)]
    assert sink.num_backlog_tokens == 2
    sink.notify_below(2, lambda: calls.append("taken"))
    assert [(p.index, p.token_ids, p.is_plain) for p in sink.rest.take()] == [(0, [2], False), (1, [3], True)]
    assert calls == ["taken"]
    assert not sink.rest.ended
    sink.choice(ChoiceDelta(1, [], b"", finish_reason=FinishReason.STOP))
    assert sink.rest.ended


def test_nothing_follows_a_failure() -> None:
    session = Session()
    sink = session.sink(1)
    sink.fail(ErrorStatus(4, "too late"))
    sink.delta(0, [1], PLAIN)
    sink.choice(ChoiceDelta(0, [1], PLAIN))
    assert session.take() == []
    assert list(sink.rest.take()) == []
    assert sink.rest.error == ErrorStatus(4, "too late")


def _filled(num_deltas: int) -> Outbox:
    session = Session()
    for stream_id in range(num_deltas):
        session.sink(stream_id).delta(0, list(range(100)), bytes(100))
    return session.outbox
