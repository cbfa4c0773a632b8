"""What the simulation API takes and gives, as pydantic models; /openapi.json is made from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Label = Annotated[str, Field(max_length=128)]
Text = Annotated[str, Field(max_length=200_000)]


class ChatTurn(BaseModel):
    """One message of a prompt."""

    model_config = ConfigDict(extra="ignore")

    role: Annotated[str, Field(min_length=1, max_length=32)]
    content: Text


class SimulateBody(BaseModel):
    """A request to simulate: chat messages."""

    model_config = ConfigDict(extra="ignore")

    request_id: Label = ""
    session_id: Label = ""
    tenant_id: Label = ""
    messages: Annotated[list[ChatTurn], Field(min_length=1, max_length=256)]


class BlockReply(BaseModel):
    """One block of a prompt."""

    semantic_type: str
    token_count: int
    content_hash: str
    hit: bool


class SimulateReply(BaseModel):
    """What a request found in the simulated cache."""

    simulated: Literal[True] = True
    request_id: str
    policy: str
    prompt_tokens: int
    cached_prompt_tokens: int
    uncached_prompt_tokens: int
    estimated_ttft_ms: float
    blocks: list[BlockReply]
    replayed_requests: int


class ExperimentBody(BaseModel):
    """An experiment to run: one that ships by its name, or made-up traffic of some families."""

    model_config = ConfigDict(extra="forbid")

    experiment: Label | None = None
    workload_families: Annotated[list[Label], Field(max_length=9)] = []
    sessions: Annotated[int, Field(ge=1, le=100)] = 20
    requests: Annotated[int, Field(ge=1, le=20)] = 5
    capacity_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 2000
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    policies: Annotated[list[Label], Field(max_length=20)] = []


class MockReply(BaseModel):
    """What a mock backend says: no text was generated, and no server was observed."""

    mock: Literal[True] = True
    usage: dict[str, Any]
    trace: dict[str, Any]


class ErrorReply(BaseModel):
    """An error in OpenAI's shape."""

    error: dict[str, Any]
