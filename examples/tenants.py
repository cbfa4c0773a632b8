"""A donor never crosses its namespace: tenants, models, adapters.

python examples/tenants.py
"""

from semblend import Decline, Namespace, Prompt, ReusePlan, SemBlend

CONTRACT = range(1000, 1600)


def told(decision: ReusePlan | Decline) -> str:
    return f"nothing ({decision.reason})" if isinstance(decision, Decline) else f"{decision.reused_tokens} tokens"


def main() -> None:
    acme = Namespace(tenant="acme", model="llama-3.1-8b", revision="2", salt="acme-secret")
    with SemBlend() as sb:
        sb.register(Prompt(CONTRACT, namespace=acme), donor_id="contract")

        for label, namespace in {
            "the same namespace": acme,
            "another tenant": Namespace(tenant="bolt", model="llama-3.1-8b", revision="2", salt="acme-secret"),
            "another model": Namespace(tenant="acme", model="qwen-2.5-7b", revision="2", salt="acme-secret"),
            "another LoRA adapter": Namespace(
                tenant="acme", model="llama-3.1-8b", revision="2", salt="acme-secret", adapter="legal-v3"
            ),
            "no namespace": None,
        }.items():
            print(f"{label:22} {told(sb.lookup(Prompt(CONTRACT, namespace=namespace)))}")

        print(f"in events it is called {acme.digest}")
        print(f"forgotten for acme: {sb.forget_where(tenant='acme')}, left: {len(sb.donors())}")


if __name__ == "__main__":
    main()
