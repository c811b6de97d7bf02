"""From two Hellos to one agreement, or every reason why not."""

from __future__ import annotations

import copy
import re
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from kvplug.errors import HandshakeError
from kvplug.negotiation.agreement import Agreement, agree
from kvplug.negotiation.hello import EngineFacts, Hello
from kvplug.negotiation.model import ModelInfo
from kvplug.negotiation.select import Offer
from kvplug.net.trust.identity import PeerIdentity
from kvplug.transport.capabilities import Capabilities
from kvplug.transport.spec import Probe

MODEL = ModelInfo(name="m", num_layers=30, num_kv_heads=3, head_size=64, dtype="float32", weights="w")
NET = Offer(
    name="net", capabilities=Capabilities(cross_host=True, cost=Capabilities.Cost(latency_us=50, gb_per_s=2))
)
LOCAL = Offer(
    name="local",
    capabilities=Capabilities(cost=Capabilities.Cost(latency_us=5, gb_per_s=8)),
    probe=Probe(domain="d"),
)
GPU = Offer(
    name="gpu",
    capabilities=Capabilities(
        devices={"cuda"},
        cross_host=True,
        authenticated=False,
        cost=Capabilities.Cost(latency_us=9, gb_per_s=90),
    ),
)
OURS = Hello(
    engine=EngineFacts(role="producer", model=MODEL, layers=(0, 30), layout="KBTHD", block_size=16),
    checksums=("xxh3_64", "xxh3_128"),
    transports=(NET, LOCAL, GPU),
    engine_id="prefill",
    identity=PeerIdentity(boot_id="boot", pid=1, label="prefill"),
)


def changed(hello: Hello, **change: Any) -> Hello:
    """The statement with these facts: its own, its engine's or the model's, which have no name in common."""
    engine = hello.engine
    if engine is not None:
        model = attrs.evolve(engine.model, **_of(ModelInfo, change))
        engine = attrs.evolve(engine, model=model, **_of(EngineFacts, change))
    return attrs.evolve(hello, **{"engine": engine, **_of(Hello, change)})


def _of(cls: type, change: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in change.items() if key in attrs.fields_dict(cls)}


THEIRS = changed(
    OURS, role="consumer", engine_id="decode", identity=PeerIdentity(boot_id="boot", pid=2, label="decode")
)


def refused(ours: Hello, theirs: Hello) -> tuple[str, ...]:
    with pytest.raises(HandshakeError) as refusal:
        agree(ours, theirs)
    return refusal.value.reasons


def fields(reasons: tuple[str, ...]) -> list[str]:
    return [reason.partition(":")[0] for reason in reasons]


def mirrored(reason: str) -> str:
    """What the other end says of the same thing."""
    other = re.sub(r"\bours\b", "\0", reason)
    other = re.sub(r"\btheirs\b", "ours", other).replace("\0", "theirs")
    found = re.fullmatch(r"([\w. ]+): (?:ours|theirs) (.*), (?:ours|theirs) (.*?); (.*)", other, re.DOTALL)
    assert found is not None, reason
    field, first, second, change = found.groups()
    return f"{field}: ours {second}, theirs {first}; {change}"


def test_two_engines_of_one_id_are_refused_where_kv_crosses() -> None:
    twin = attrs.evolve(THEIRS, engine_id=OURS.engine_id)
    (reason,) = refused(OURS, twin)
    assert reason.startswith("engine_id: ours 'prefill', theirs 'prefill'; give each engine an id of its own")
    agree(OURS, attrs.evolve(twin, moves_kv=False))


# -- properties ------------------------------------------------------------------------------------

MODELS = st.builds(
    ModelInfo,
    name=st.sampled_from(["m", "other name"]),
    attention=st.sampled_from(["mha", "mha", "mla"]),
    num_layers=st.sampled_from([30, 30, 32]),
    num_kv_heads=st.just(3),
    head_size=st.just(64),
    dtype=st.sampled_from(["float32", "float32", "bfloat16"]),
    rope=st.sampled_from(["", "", "yarn"]),
    window=st.sampled_from([None, None, 4096]),
    weights=st.sampled_from(["", "w1", "w2"]),
)
ENGINES = st.builds(
    EngineFacts,
    role=st.sampled_from(["producer", "consumer", "both"]),
    model=st.just(MODEL) | MODELS,
    layers=st.sampled_from([None, (0, 30), (0, 30), (0, 15)]),
    cache_layers=st.sampled_from([None, 30, 30, 31]),
    tensor_parallel_size=st.sampled_from([1, 1, 1, 2]),
    tensor_parallel_rank=st.sampled_from([None, 0, 0, 1]),
    layout=st.sampled_from(["KBTHD", "KBHTD", "BHTKD", "BTD"]),
    block_size=st.sampled_from([16, 32]),
    block_format=st.sampled_from(["", "", "", "engine/kernel", "engine/other"]),
    splits_heads=st.booleans(),
)
HELLOS = st.builds(
    Hello,
    wire=st.sampled_from([(1, 0), (1, 0), (1, 3), (2, 0)]),
    purpose=st.sampled_from(["", "", "entries", "events"]),
    moves_kv=st.sampled_from([True, True, False]),
    engine=ENGINES,
    integrity=st.sampled_from(["auto", "auto", "off", "xxh3_64", "xxh3_128"]),
    checksums=st.sampled_from(
        [(), ("xxh3_64",), ("xxh3_128",), ("xxh3_64", "xxh3_128"), ("xxh3_128", "xxh3_64")]
    ),
    requested_transport=st.sampled_from(["auto", "auto", "net", "local", "gpu", "rdma"]),
    transports=st.lists(st.sampled_from([NET, LOCAL, GPU]), unique_by=lambda it: it.name).map(tuple),
    device=st.sampled_from(["cpu", "cpu", "cuda", "cuda:1"]),
    require_authenticated=st.booleans(),
    identity=st.builds(PeerIdentity, boot_id=st.sampled_from(["boot", "boot", "other", ""]), pid=st.just(7)),
)


def common(found: Agreement) -> Any:
    """What is the same at both ends."""
    chosen = {device: it.chosen for device, it in found.transports.items()}
    return found.purpose, found.wire_minor, found.checksum, found.cross_host, chosen, fields(found.converts)


@given(HELLOS, HELLOS)
def test_both_ends_agree_on_what_holds_for_both_or_refuse_for_mirrored_reasons_and_change_nothing(
    a: Hello, b: Hello
) -> None:
    before = copy.deepcopy((a, b))
    try:
        found = agree(a, b)
    except HandshakeError as e:
        for mine, yours in zip(e.reasons, refused(b, a), strict=True):
            if mine.startswith("transport") or "both sides are" in mine:
                assert mine.partition(":")[0] == yours.partition(":")[0]
            else:
                assert mirrored(mine) == yours
    else:
        assert common(found) == common(agree(b, a))
        check_agreement(found, a, b)
    assert (a, b) == before


def check_agreement(found: Agreement, a: Hello, b: Hello) -> None:
    assert found.remote is b
    assert a.wire[0] == b.wire[0] and a.engine is not None and b.engine is not None
    assert a.engine.model.dtype == b.engine.model.dtype
    if found.checksum is None:
        assert {a.integrity, b.integrity} <= {"auto", "off"}
    else:
        assert found.checksum in a.checksums and found.checksum in b.checksums
    if not (a.moves_kv and b.moves_kv):
        assert not found.transports
        return
    assert {a.engine.role, b.engine.role} not in ({"producer"}, {"consumer"})
    assert "cpu" in found.transports
    assert "cuda" in found.transports or not all(each.device.startswith("cuda") for each in (a, b))


# -- each field ------------------------------------------------------------------------------------


def test_two_that_fit_agree() -> None:
    informative = {
        "rank": 3,
        "world_size": 4,
        "epoch": "x",
        "versions": {"x": "9"},
        "name": "n",
        "wire": (1, 7),
    }
    theirs = changed(THEIRS, **informative)
    for found, remote in ((agree(OURS, THEIRS), THEIRS), (agree(OURS, theirs), theirs)):
        assert found.remote is remote
        agreed = found.wire_minor, found.checksum, found.cross_host, found.converts
        assert agreed == (0, "xxh3_64", False, ())
        assert {device: it.chosen for device, it in found.transports.items()} == {"cpu": "local"}
    assert agree(OURS, changed(THEIRS, block_size=32, layout="KBHTD")).converts == (
        "block_size: ours 16, theirs 32",
        "layout: ours KBTHD, theirs KBHTD",
    )


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "wire": ({"wire": (2, 0)}, "wire: ours 1.0, theirs 2.0; upgrade kvplug at the older end"),
    "layers": ({"layers": (0, 15)}, "layers: ours (0, 30), theirs (0, 15); split the layers"),
    "tensor parallel size": (
        {"tensor_parallel_size": 2},
        "tensor_parallel_size: ours 1, theirs 2; split the",
    ),
    "latent": ({"layout": "BTD"}, "layout: ours 'KBTHD', theirs 'BTD'; one end has keys and values"),
    "integrity": (
        {"integrity": "crc", "checksums": ("crc",)},
        "integrity: ours 'auto' (can use xxh3_64, xxh3_128), theirs 'crc' (can use crc); set integrity to",
    ),
    "attention": ({"attention": "mla"}, "model.attention: ours 'mha', theirs 'mla'; start both ends"),
    "num_layers": ({"num_layers": 32}, "model.num_layers: ours 30, theirs 32; start both ends"),
    "num_kv_heads": ({"num_kv_heads": 8}, "model.num_kv_heads: ours 3, theirs 8; start both"),
    "head_size": ({"head_size": 128}, "model.head_size: ours 64, theirs 128; start both"),
    "dtype": ({"dtype": "bfloat16"}, "dtype: ours 'float32', theirs 'bfloat16'; set the KV cache's dtype"),
    "rope": ({"rope": "yarn"}, "model.rope: ours none, theirs 'yarn'; give both ends"),
    "window": ({"window": 4096}, "model.window: ours none, theirs 4096; give both ends"),
    "quantisation": ({"quantisation": "fp8"}, "model.quantisation: ours none, theirs 'fp8'; quantise"),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_a_field_that_must_match_is_refused_with_both_values_and_what_to_change(
    change: dict[str, Any], reason: str
) -> None:
    found = refused(OURS, changed(THEIRS, **change))
    assert len(found) == 1 and found[0].startswith(reason)
    assert refused(changed(THEIRS, **change), OURS) == (mirrored(found[0]),)


def test_every_fact_of_the_model_is_compared_or_known_to_be_informative() -> None:
    covered = {key for change, _ in CHANGES.values() for key in change} | {"name", "weights"}
    assert {field.name for field in attrs.fields(ModelInfo)} <= covered


def test_all_differing_fields_are_told_at_once() -> None:
    everything = {key: value for change, _ in CHANGES.values() for key, value in change.items()}
    theirs = changed(changed(THEIRS, **everything), role="producer", requested_transport="rdma")
    found = set(fields(refused(OURS, theirs)))
    assert found == {
        *(reason.partition(":")[0] for _, reason in CHANGES.values()),
        *("role", "transport", "transport net", "transport local", "transport gpu", "transport rdma"),
    }


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_two_of_one_role_are_refused_and_both_works_with_anything(role: str) -> None:
    ours, theirs = changed(OURS, role=role), changed(THEIRS, role=role)
    assert refused(ours, theirs)[0].startswith(f"role: both sides are {role}s; set the role of one to ")
    for other in (theirs, changed(THEIRS, role="both")):
        assert agree(changed(OURS, role="both"), other)


def test_a_draft_models_layers_are_in_the_caches_of_both_or_of_neither() -> None:
    ours, theirs = changed(OURS, cache_layers=30), changed(THEIRS, cache_layers=31)
    (reason,) = refused(ours, theirs)
    assert reason.startswith("cache_layers: ") and "draft model" in reason
    assert agree(ours, changed(theirs, cache_layers=30))
    assert agree(ours, changed(theirs, cache_layers=None)), "a scheduler holds none"
    assert fields(refused(ours, changed(theirs, layers=(0, 15)))) == ["layers"], "another stage"


def test_a_plain_pipe_meets_a_plain_pipe_and_no_engine() -> None:
    ours, theirs = changed(OURS, engine=None), changed(THEIRS, engine=None)
    assert agree(ours, theirs).transports["cpu"].chosen == "local"
    (reason,) = refused(ours, THEIRS)
    assert reason.startswith("engine: ours 'a plain pipe', theirs 'an engine'; connect an engine to")
    assert refused(THEIRS, ours) == (mirrored(reason),)


@pytest.mark.parametrize(("ours", "theirs"), [("w1", "w2"), ("w1", ""), ("", "w2"), ("", "")])
def test_weights_that_differ_or_are_unknown_are_refused(ours: str, theirs: str) -> None:
    (reason,) = refused(changed(OURS, weights=ours), changed(THEIRS, weights=theirs))
    assert reason.startswith("model.weights: ") and "set weights to the same text at both" in reason


@pytest.mark.parametrize("layout", ["BTD", "KBTHD"])
def test_blocks_in_a_kernels_own_order_go_to_another_number_of_workers_only_where_each_has_all(
    layout: str,
) -> None:
    sides = []
    for hello, size in ((OURS, 1), (THEIRS, 2)):
        facts = {"layout": layout, "block_format": "engine 1/kernel", "tensor_parallel_size": size}
        sides.append(changed(hello, splits_heads=True, tensor_parallel_rank=size - 1, **facts))
    if layout == "BTD":
        assert agree(*sides).converts == ()
        reason, _ = refused(sides[0], changed(sides[1], splits_heads=False))
        assert reason.startswith("tensor_parallel_size: ") and "use a connector that converts" in reason
    else:
        found = refused(*sides)
        assert fields(found) == ["tensor_parallel_size", "tensor_parallel_rank"]
        assert "blocks in a kernel's own order cannot be divided" in found[0]


def test_blocks_in_a_kernels_own_order_go_only_where_all_is_equal() -> None:
    packed = changed(OURS, block_format="engine 1/kernel")
    assert agree(packed, changed(THEIRS, block_format="engine 1/kernel")).converts == ()
    theirs = changed(THEIRS, block_format="engine 2/kernel", block_size=32, layout="KBHTD")
    for one, other in ((packed, theirs), (theirs, packed), (OURS, theirs)):
        assert fields(refused(one, other)) == ["block_format", "block_size", "layout"]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (("auto", "xxh3_64 xxh3_128"), ("auto", "xxh3_64 xxh3_128"), "xxh3_64"),
        (("auto", "xxh3_64"), ("auto", "xxh3_128 xxh3_64"), "xxh3_64"),
        (("auto", "xxh3_64"), ("auto", "xxh3_128"), None),
        (("auto", "xxh3_64"), ("auto", ""), None),
        (("off", ""), ("off", ""), None),
        (("off", ""), ("auto", "xxh3_64"), None),
        (("xxh3_128", "xxh3_128"), ("auto", "xxh3_64 xxh3_128"), "xxh3_128"),
        (("xxh3_64", "xxh3_64"), ("off", ""), "refused"),
        (("xxh3_64", "xxh3_64"), ("xxh3_128", "xxh3_128"), "refused"),
        (("xxh3_64", "xxh3_64"), ("auto", ""), "refused"),
    ],
)
def test_a_hash_is_used_if_both_have_one_and_a_named_one_is_insisted_on(
    ours: tuple[str, str], theirs: tuple[str, str], expected: str | None
) -> None:
    def side(hello: Hello, integrity: tuple[str, str]) -> Hello:
        return changed(hello, integrity=integrity[0], checksums=tuple(integrity[1].split()))

    a, b = side(OURS, ours), side(THEIRS, theirs)
    if expected == "refused":
        assert fields(refused(a, b)) == fields(refused(b, a)) == ["integrity"]
    else:
        assert agree(a, b).checksum == agree(b, a).checksum == expected


# -- transports ------------------------------------------------------------------------------------


def test_another_boot_of_a_kernel_is_another_host() -> None:
    theirs = changed(THEIRS, identity=PeerIdentity(boot_id="other", pid=2))
    found = agree(OURS, theirs)
    assert found.cross_host and found.transports["cpu"].chosen == "net"
    unknown = changed(THEIRS, identity=PeerIdentity(pid=2))
    assert agree(OURS, unknown).cross_host
    assert agree(unknown, changed(unknown, role="producer", engine_id="third")).cross_host


def test_an_unauthenticated_data_plane_is_refused_where_other_hosts_can_reach_either_end() -> None:
    ours, theirs = changed(OURS, device="cuda"), changed(THEIRS, device="cuda")
    exposed = changed(theirs, require_authenticated=True)
    for a, b in ((ours, exposed), (exposed, ours)):
        assert "allow_unauthenticated_data_plane" in " ".join(refused(a, b))
