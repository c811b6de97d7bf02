"""A store and its reaching ends over the pipe "cpu", between real processes that are killed and stopped."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kvplug import Registry, TimeoutError
from kvplug.transport import Credentials, Kind, LookupContext, PipeContext
from kvplug_testing import peers

LAYERS, TOKENS, HEADS, SIZE = 12, 256, 4, 64
PROMPT = list(range(1000, 1000 + TOKENS))


def pipe_endpoint():
    """In flight no more than half a layer, so that a transfer stops in the middle without a reader."""
    spec = Registry.from_env().get(Kind.PIPE, "cpu")
    options = spec.load_options()(max_in_flight_bytes=1 << 17, socket_buffer_bytes=1 << 16)
    context = PipeContext(options=options, credentials=Credentials(), timeout_s=20.0)
    return spec.load_factory()(context)


def lookup_endpoint():
    spec = Registry.from_env().get(Kind.LOOKUP_BUFFER, "simple")
    return spec.load_factory()(LookupContext(options=None, buffer_size=1 << 30, timeout_s=20.0))


def kv(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, LAYERS, TOKENS, HEADS, SIZE, generator=generator)


def insert(store, seed=0, tokens=PROMPT):
    key, value = kv(seed)
    return store.insert(tokens, None, key, value, key[0, -1])


class Serving:
    """A store in this process, and a listener through which others reach it."""

    def __init__(self):
        self.store = lookup_endpoint().hold()
        self.listener = pipe_endpoint().listen()
        self.contact = self.listener.contact

    def attach(self):
        self.store.attach(self.listener.accept(20), self.listener.accept(20))

    def close(self):
        self.listener.close()
        self.store.close(5)


@pytest.fixture(autouse=True)
def one_torch_thread():
    """OpenMP keeps a pool for each thread that ever computed: it would look like ours left behind."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def serving():
    with peers.nothing_left():
        serving = Serving()
        yield serving
        serving.close()


def reach(contact):
    endpoint = pipe_endpoint()
    signal = endpoint.connect(contact, 20)
    return lookup_endpoint().reach(signal, endpoint.connect(contact, 20))


def wait_until(condition, timeout=5):
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)


# -- what runs in the child --------------------------------------------------------------------


def stop_in_the_middle(parent, contact, timeout):
    end = reach(contact)
    received = [0]
    inner = end._data.recv_tensor

    def recv_tensor(out=None, *, timeout=None):
        if received[0] == 2 * 3:
            parent.send(3)
            parent.recv(None)
        received[0] += 1
        return inner(out, timeout=timeout)

    end._data.recv_tensor = recv_tensor
    end.drop_select(PROMPT, timeout=timeout)
    return "done"


# -- tests -------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_stopped_consumer_keeps_its_entry_until_its_time_is_over(serving):
    insert(serving.store)
    with peers.start(stop_in_the_middle, serving.contact, 1.5) as consumer:
        serving.attach()
        assert consumer.recv() == 3
        consumer.stop()
        with pytest.raises(TimeoutError):
            serving.store.drop_select(PROMPT, timeout=0.2)
        serving.store.insert([1], None, None, None, None, timeout=0)  # no other caller is held up
        entry = serving.store.drop_select(PROMPT, timeout=15)
        assert torch.equal(torch.stack((entry.key, entry.value)), kv())
        consumer.cont()
        consumer.send("go on")
        with pytest.raises(peers.ChildError, match="TimeoutError"):
            consumer.result()


def test_transfers_given_up_at_random_moments_leave_the_pipes_in_order(serving):
    attached = threading.Thread(target=serving.attach)
    attached.start()
    end = reach(serving.contact)
    attached.join()
    entry_id = insert(serving.store)
    outcomes = set()
    for n in range(40):
        try:
            entry = end.select(PROMPT, timeout=0.0005 * (1 + n % 20))
            assert torch.equal(torch.stack((entry.key, entry.value)), kv())
            outcomes.add("read")
        except TimeoutError:
            outcomes.add("given up")
    entry = end.drop_select(PROMPT, timeout=10)
    assert entry.header.entry_id == entry_id
    assert torch.equal(torch.stack((entry.key, entry.value)), kv())
    wait_until(lambda: serving.store.bytes_used == 0)
    assert "given up" in outcomes
    end.close()
