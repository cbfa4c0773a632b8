"""One prompt made of many: passages of three donors, reordered, with an edit in the middle of one.

python examples/several_donors.py
"""

import numpy as np

from semblend import Prompt, SemBlend

rng = np.random.default_rng(7)
PASSAGES = {name: rng.integers(0, 50_000, 400) for name in ("tides", "pilots", "customs", "weather")}
EDITED_TOKEN = 60_001  # an id that no passage contains


def main() -> None:
    with SemBlend() as sb:
        sb.register(Prompt(np.concatenate([PASSAGES["tides"], PASSAGES["pilots"]])), donor_id="monday")
        sb.register(Prompt(PASSAGES["customs"]), donor_id="tuesday")
        sb.register(Prompt(np.concatenate([rng.integers(0, 50_000, 90), PASSAGES["weather"]])), donor_id="friday")

        customs = PASSAGES["customs"].copy()
        customs[200] = EDITED_TOKEN  # one word changed since Tuesday
        question = rng.integers(0, 50_000, 25)
        prompt = Prompt(np.concatenate([PASSAGES["weather"], customs, PASSAGES["pilots"], question]))

        plan = sb.lookup(prompt)
        print(f"{plan.reused_tokens} of {plan.prompt_tokens} tokens from {len(plan.donor_ids)} donors")
        for span in plan.spans:
            print(f"  [{span.target_start:4}, {span.target_end:4})  {span.donor_id:8} shift {span.shift:+d}")
        edited_at = 400 + 200
        kept = any(span.target_start <= edited_at < span.target_end for span in plan.spans)
        print(f"the edited token is {'REUSED' if kept else 'left to the engine'}")

        # Spans are equal token by token; nothing else is ever in a plan.
        for span in plan.spans:
            donor = sb.donor_tokens(span.donor_id)[span.donor_start : span.donor_end]
            assert np.array_equal(donor, prompt.token_ids[span.target_start : span.target_end])
        print("every span checked against its donor")


if __name__ == "__main__":
    main()
