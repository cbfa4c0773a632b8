"""Cases with planted facts for the live tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sembench.cli import main
from sembench.manifests.cases import Case, DonorPrompt, write_manifest
from sembench.result import Result, read_result


def document(name: str, code: str, length: int = 90) -> str:
    body = " ".join(f"{name} pier {at} holds {at * 7 % 50} boats," for at in range(length))
    return f"The code of the harbour is {code}. {body}"


def positive(number: int) -> Case:
    own, other = f"K{number}17", f"Q{number}93"
    name = f"harbour{number}"
    return Case(
        item_id=f"p{number}",
        dataset="test",
        source_id=name,
        transform="swapped_numbers",
        donor_prompts=(DonorPrompt(f"d{number}", f"Read this. {document(name, other)} Which code?"),),
        recipient_prompt=f"Please read this closely. {document(name, own)} What is the code?",
        input="What is the code?",
        answers=(own,),
        metadata={"planted_fact": own, "donor_fact": other},
    )


def negative(number: int) -> Case:
    case = positive(number + 100)
    unrelated = " ".join(f"mountain {at} rises {at * 13} metres;" for at in range(90))
    return Case(
        item_id=f"n{number}",
        dataset="test",
        source_id=case.source_id,
        transform="negative_control",
        donor_prompts=(DonorPrompt("u", f"Geography. {unrelated}", "unrelated_base_prompt"),),
        recipient_prompt=case.recipient_prompt,
        answers=case.answers,
        negative_control=True,
    )


def manifest(folder: Path, positives: int = 3, negatives: int = 2) -> Path:
    path = folder / "cases.jsonl"
    write_manifest(path, [positive(at) for at in range(positives)] + [negative(at) for at in range(negatives)])
    return path


def run_gateway(url: str, folder: Path, *flags: str, cases: Path | None = None) -> Result:
    """The command itself, as a person would run it."""
    output = folder / "result.json"
    code = gateway_code(url, folder, *flags, cases=cases)
    assert code == 0
    return read_result(output)


def gateway_code(url: str, folder: Path, *flags: str, cases: Path | None = None) -> int:
    words: list[Any] = ["run-live-gateway", "--manifest", cases or manifest(folder), "--output", folder / "result.json"]
    words += ["--gateway-url", url, "--model", "liar", "--quiet", "--warmup-requests", "1", *flags]
    return main([str(word) for word in words])
