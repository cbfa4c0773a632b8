"""The same document under another instruction: find it, look at the plan, ask why.

python examples/quickstart.py
"""

from semblend import Decline, Prompt, ReusePlan, SemBlend
from semblend.text.tokenization import StableTokenizer

MANUAL = " ".join(
    f"Pump {number} is started from the north panel, runs at {20 + number} bar, and trips after {90 - number} seconds "
    f"without flow. Its spare stands in bay {number % 7}."
    for number in range(1, 41)
)


def main() -> None:
    encode = StableTokenizer().encode  # built in and model-free; use your model's own tokenizer in earnest
    earlier = Prompt(encode(f"Summarize this manual for a new operator.\n\n{MANUAL}"))
    now = Prompt(encode(f"You answer briefly.\n\n{MANUAL}\n\nWhich pump stands in bay 3?"))

    with SemBlend() as sb:
        sb.register(earlier, donor_id="req-1")
        match sb.lookup(now):
            case ReusePlan() as plan:
                print(f"{plan.reused_tokens} of {len(now)} tokens are held by {plan.donor_ids[0]}")
                for span in plan.spans:
                    print(f"  target [{span.target_start}, {span.target_end}) <- donor from {span.donor_start}")
            case Decline(reason, detail):
                print(f"nothing to reuse: {reason} ({detail})")
        print(sb.explain(now))

        stranger = Prompt(encode("Write a limerick about a lighthouse keeper and a very small boat. " * 5))
        print(sb.lookup(stranger))


if __name__ == "__main__":
    main()
