"""Every field of every route with hostile values, from the schema, while another tenant's greedy answers are computed.

The engine is the real one over a small random model. A new field is attacked without a change here.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("fastapi", reason="the server needs fastapi")
httpx = pytest.importorskip("httpx", reason="the tests need httpx")

from pydantic import BaseModel  # noqa: E402
from small_models import Characters  # noqa: E402

from semblend import SemBlend, SemBlendConfig  # noqa: E402
from semblend.engine.core.assemble import assemble  # noqa: E402
from semblend.engine.core.config import EngineConfig  # noqa: E402
from semblend.engine.model.model import DecoderModel  # noqa: E402
from semblend.engine.model.spec import ModelSpec  # noqa: E402
from semblend.engine.server.config import ServeConfig  # noqa: E402
from semblend.engine.server.local_engine import LocalEngine  # noqa: E402
from semblend.engine.server.openapi import OPERATIONS, write_document  # noqa: E402
from semblend.engine.server.routes import create_app  # noqa: E402
from semblend.engine.server.tenants import Tenants  # noqa: E402

SHAPE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
PATIENCE_S = 120.0
VICTIM = {"prompt": list(range(5, 69)), "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 0}
KEYS = Tenants({"sk-hostile": "hostile", "sk-victim": "victim"}, admin_keys=["sk-root"])
DOCUMENT = write_document(most_n=8, need_key=True)
SCHEMAS = DOCUMENT["components"]["schemas"]

# Hostile values as JSON text; True: nobody may accept this, whatever the field.
VALUES: dict[str, tuple[str, bool]] = {
    "null": ("null", False),
    "true": ("true", False),
    "zero": ("0", False),
    "minus one": ("-1", False),
    "tiny": ("1e-38", False),
    "subnormal": ("1e-320", False),
    "huge": ("1e308", False),
    "beyond floats": ("1e999", False),
    "beyond 64 bits": (str(10**30), False),
    "negative zero": ("-0.0", False),
    "a number of 65 digits": ("9" * 65, True),
    "a number of 5,000 digits": ("9" * 5000, True),
    "NaN": ("NaN", True),
    "Infinity": ("-Infinity", True),
    "empty": ('""', False),
    "control characters": (r'"\u0000\u001b[31m\r\n\u2028\u202e"', False),
    "half a surrogate pair": (r'"\ud800"', True),
    "very long": ('"' + "x" * 100_000 + '"', False),
    "escapes": ('"' + r"\u00e9" * 20_000 + '"', False),
    "an empty list": ("[]", False),
    "a list of null": ("[null]", False),
    "5,000 numbers": (json.dumps([1] * 5000), False),
    "5,000 words": (json.dumps(["x"] * 5000), False),
    "3,000 lists": (json.dumps([[1]] * 3000), False),
    "200,000 numbers": ("[" + "1," * 200_000 + "1]", True),
    "20,000 lists": ("[" + "[]," * 20_000 + "[]]", True),
    "60 deep": ("[" * 60 + "]" * 60, False),
    "70 deep": ("[" * 70 + "]" * 70, True),
    "957 deep": ('{"a":' * 957 + "1" + "}" * 957, True),
    "an empty object": ("{}", False),
    "3,000 names": (json.dumps({str(n): 1 for n in range(3000)}), False),
    "70,000 names": (json.dumps({str(n): 1 for n in range(70_000)}), True),
}
FEW = ("null", "tiny", "very long", "3,000 lists", "NaN", "70 deep", "3,000 names")
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
}
NEEDS = {
    "input_ids": {"text": None},
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "top_logprobs_num": {"return_logprob": True},
}
Place = tuple[str | int, ...]


def list_places(schema: dict[str, Any], at: Place = ()) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Every field, list item and map entry that a schema speaks of, with its own schema."""
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    for choice in schema.get("anyOf", ()):
        yield from list_places(choice, at)
    for name, inner in schema.get("properties", {}).items():
        yield (*at, name), inner
        yield from list_places(inner, (*at, name))
    if "items" in schema:
        yield (*at, 0), schema["items"]
        yield from list_places(schema["items"], (*at, 0))
    if isinstance(schema.get("additionalProperties"), dict):
        yield (*at, "5"), schema["additionalProperties"]


def put(body: Any, place: Place, value: Any) -> Any:
    """The body with a value at a place; what is on the way there is made where it is missing."""
    if not place:
        return value
    head, *rest = place
    if isinstance(head, int):
        inner = body[0] if isinstance(body, list) and body else None
        return [put(inner, tuple(rest), value)]
    base = body if isinstance(body, dict) else {}
    return base | {head: put(base.get(head), tuple(rest), value)}


def list_cases() -> dict[tuple[str, Place], dict[str, Any]]:
    found: dict[tuple[str, Place], dict[str, Any]] = {}
    for operation in OPERATIONS:
        if operation.body is not None:
            for place, schema in list_places(SCHEMAS[operation.body.__name__]):
                found.setdefault((operation.path, place), schema)
            found[operation.path, ("a field that nobody knows",)] = {}
    return found


CASES = list_cases()


def name_values(schema: dict[str, Any]) -> tuple[str, ...]:
    """All hostile values; a few for options that are only there to be refused."""
    return FEW if "enum" in schema and "type" not in schema and "anyOf" not in schema else tuple(VALUES)


def write_body(path: str, place: Place, raw: str) -> bytes:
    needs = NEEDS.get(str(place[0]), {})
    body = {name: value for name, value in (BASES[path] | needs).items() if value is not None}
    return json.dumps(put(body, place, "@here@")).replace('"@here@"', raw).encode()


class Server:
    """The app over a started engine; one event loop in a thread of its own."""

    def __init__(self) -> None:
        library = SemBlend(SemBlendConfig(embedder="none", metrics=False))
        model = DecoderModel.random(ModelSpec.from_hf_config(SHAPE))
        model.warm_up()  # kernels are compiled at start, as `semblend serve` does, and not in the victim's time
        config = EngineConfig(model_name="tiny", quality="exact")
        self.engine = LocalEngine(
            assemble(model, pool_tokens=8192, semblend=library, config=config, detokenizer=Characters()), Characters()
        )
        self.app = create_app(self.engine, ServeConfig(tenants=KEYS))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Server:
        self.engine.start()
        self._thread.start()
        self.quiet = self.run(self.ask_as_victim("quiet", 4 * PATIENCE_S))
        return self

    def __exit__(self, *rest: Any) -> None:
        self.engine.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(300)
        self._loop.close()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(4 * PATIENCE_S)

    async def send(self, method: str, path: str, body: bytes, key: str) -> Any:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=PATIENCE_S) as http:
            return await http.request(method, path, content=body, headers={"Authorization": f"Bearer {key}"})

    async def ask_as_victim(self, salt: str, patience_s: float = PATIENCE_S) -> list[str]:
        body = json.dumps(VICTIM | {"cache_salt": salt}).encode()
        answer = await asyncio.wait_for(self.send("POST", "/v1/completions", body, "sk-victim"), patience_s)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["logprobs"]["tokens"]

    async def attack(self, requests: list[tuple[str, str, bytes]], salt: str) -> tuple[list[Any], list[list[str]]]:
        """All hostile requests at once; the victim asks again and again until the last of them is answered."""
        sent = asyncio.gather(*(self.send(*request, "sk-hostile") for request in requests))
        heard = []
        while not heard or not sent.done():
            heard.append(await self.ask_as_victim(f"{salt} {len(heard)}"))
        return await sent, heard


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


def check(server: Server, names: list[str], answers: list[Any], heard: list[list[str]]) -> None:
    assert all(tokens == server.quiet for tokens in heard), "the victim's answer changed"
    for name, answer in zip(names, answers, strict=True):
        assert 200 <= answer.status_code < 500, (name, answer.text)
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code", "hint"}, name
            assert len(answer.content) < 4000, name
    assert server.run(server.send("GET", "/health", b"", "sk-victim")).status_code == 200


@pytest.mark.parametrize(
    ("path", "place"), CASES, ids=lambda one: one if isinstance(one, str) else ".".join(map(str, one))
)
def test_a_hostile_field_changes_nothing_for_another_tenant(server, path, place):
    names = name_values(CASES[path, place])
    requests = [("POST", path, write_body(path, place, VALUES[name][0])) for name in names]
    answers, heard = server.run(server.attack(requests, f"{path} {place}"[:200]))
    check(server, list(names), answers, heard)
    for name, answer in zip(names, answers, strict=True):
        if VALUES[name][1]:
            assert answer.status_code in (400, 413), (name, answer.text[:200])


TEXTS = ["%00", "%ED%A0%80", "x" * 20_000, "9" * 5000, "..%2F..%2F", "-1", "1e999", "%F0%9F%98%80" * 1000, "%", "NaN"]
PARAMETERS = [
    (operation.path, parameter["name"], parameter["in"])
    for operation in OPERATIONS
    for parameter in operation.parameters
]


@pytest.mark.parametrize(("path", "name", "place"), PARAMETERS)
def test_a_hostile_parameter_changes_nothing_for_another_tenant(server, path, name, place):
    urls = [path.replace(f"{{{name}}}", text) if place == "path" else f"{path}?{name}={text}" for text in TEXTS]
    answers, heard = server.run(server.attack([("GET", url, b"") for url in urls], path))
    check(server, urls, answers, heard)


@pytest.mark.parametrize("path", BASES)
def test_a_hostile_body_changes_nothing_for_another_tenant(server, path):
    texts = [raw for raw, _ in VALUES.values()] + ["", "{", '{"a"', "\xff", '"', "\\", "[" * 100_000, "{}" * 1000]
    answers, heard = server.run(server.attack([("POST", path, text.encode("latin-1")) for text in texts], path))
    check(server, texts, answers, heard)
    assert {answer.status_code for answer in answers} <= {400, 413}


def list_fields(model: type[BaseModel]) -> Iterator[str]:
    """Every name of a field of a model and of the models inside, found without the schema."""
    for name, field in model.model_fields.items():
        yield name
        todo = [field.annotation, *field.metadata]
        while todo:
            one = todo.pop()
            if isinstance(one, type) and issubclass(one, BaseModel):
                yield from list_fields(one)
            todo += getattr(one, "__args__", ()) or ()


def test_no_field_is_left_out():
    for operation in OPERATIONS:
        if operation.body is not None:
            attacked = {part for path, place in CASES if path == operation.path for part in place}
            assert set(list_fields(operation.body)) <= attacked
    assert {path for path, _ in CASES} == set(BASES)
    assert {path for path, *_ in PARAMETERS} == {one.path for one in OPERATIONS if "{" in one.path} | {"/api/live"}


BY_CONTEXT = {"text", "content", "arguments", "prompt", 0}
"""Texts of prompts are bounded by the context and by the size of the body."""


@pytest.mark.parametrize(
    ("path", "place"), CASES, ids=lambda one: one if isinstance(one, str) else ".".join(map(str, one))
)
def test_every_list_map_and_name_of_the_schema_has_a_limit(path, place):
    schema = CASES[path, place]
    for one in (schema, *schema.get("anyOf", ())):
        if one.get("type") == "array":
            assert one["maxItems"] <= 1 << 20
        if one.get("type") == "object":
            assert one["maxProperties"] <= 1 << 20
        if one.get("type") == "string" and place[-1] not in BY_CONTEXT:
            assert {"maxLength", "const"} & one.keys() or "enum" in schema
