"""The life of a request: lookup, claim, receipt; and what happens when the donor changes in between.

python examples/receipts.py
"""

from semblend import Decline, Outcome, Prompt, Receipt, ReceiptError, ReusePlan, SemBlend, SemBlendConfig
from semblend.confirm.sinks import MemorySink

DOCUMENT = range(5000, 6000)


def main() -> None:
    heard = MemorySink()
    with SemBlend(SemBlendConfig(embedder="none"), sinks=[heard]) as sb:
        sb.register(Prompt(DOCUMENT), donor_id="d")
        prompt = Prompt([1, 2, 3, *DOCUMENT, 4])

        plan = sb.lookup(prompt, request_id="r1")
        assert isinstance(plan, ReusePlan)
        sb.claim(plan, "r1")  # the donor is pinned from here until the receipt
        print(f"planned {plan.reused_tokens}, counted as reused: {sb.totals().tokens['reused']}")

        try:  # every token of the prompt must be counted once
            sb.confirm(receipt(prompt, plan, reused=plan.reused_tokens, prefill=1))
        except ReceiptError as error:
            print(f"refused: {error.message}")

        sb.confirm(receipt(prompt, plan, reused=plan.reused_tokens - 16, recomputed=16, prefill=4))
        print(f"confirmed, counted as reused: {sb.totals().tokens['reused']}")

        plan = sb.lookup(prompt, request_id="r2")
        sb.register(Prompt(range(9000, 9500)), donor_id="d")  # same id, other content
        late = sb.claim(plan, "r2")
        print(f"a claim after the donor changed: {late.reason if isinstance(late, Decline) else 'ACCEPTED'}")
    print("events:", ", ".join(str(event.kind) for event in heard.events))


def receipt(prompt: Prompt, plan: ReusePlan, *, reused: int, prefill: int, recomputed: int = 0) -> Receipt:
    return Receipt(
        request_id="r1", engine="example", namespace=prompt.namespace.digest, prompt_tokens=len(prompt),
        outcome=Outcome.BACKEND_MATERIALIZED_REUSE, spans=plan.spans,
        reused_tokens=reused, recomputed_tokens=recomputed, prefill_tokens=prefill,
    )  # fmt: skip


if __name__ == "__main__":
    main()
