"""What one tenant of a vLLM engine learns of another, and what it can do to it. A tenant is a cache_salt."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest

from semblend import Namespace, SemBlend, SemBlendConfig
from semblend.integration.vllm.orders import Report
from semblend.integration.vllm.scheduler.records import EngineFacts
from semblend.integration.vllm.scheduler.scheduler_connector import SchedulerConnector
from semblend.integration.vllm.settings import ConnectorSettings, connector_settings

BLOCK = 16
SECRET = list(range(1000, 1200))
DONOR_WORDS = ("donor", "span", "start", "namespace", "generation")


class Request(SimpleNamespace):
    """What the half reads of vLLM's request."""

    def __init__(self, name, tokens, salt=None, **rest):
        super().__init__(
            request_id=name,
            prompt_token_ids=list(tokens),
            cache_salt=salt,
            lora_request=None,
            prompt_embeds=None,
            pooling_params=None,
            kv_transfer_params=None,
            mm_features=[],
            arrival_time=0.0,
            num_output_tokens=1,
            skip_reading_prefix_cache=False,
            resumable=False,
            block_hashes=[hashlib.sha256(f"{name}{at}".encode()).digest() for at in range(len(list(tokens)) // BLOCK)],
            _block_hasher=lambda request: [],
            update_block_hashes=lambda: None,
        )
        vars(self).update(rest)


class Engine:
    """A scheduler half whose worker does all it is told."""

    def __init__(self, **settings):
        config = {
            "quality": "fast",
            "metrics": False,
            "embedder": "none",
            "max_donors": settings.pop("max_donors", 100),
        }
        made = ConnectorSettings(config=SemBlendConfig(**config), **settings)
        facts = EngineFacts("0.32.0", Namespace(model="m"), BLOCK, BLOCK, None)
        self.half = SchedulerConnector(facts, made, SemBlend(made.config), clock=lambda: 1.0)

    def ask(self, request):
        """The claim of a request, and its receipt; a claimed one is given up, for what counts is what it was told."""
        claimed = self.half.count_matched(request, 0)
        if claimed:
            self.half.give_up(request.request_id)
            return claimed, None
        tokens = len(request.prompt_token_ids)
        self.half.note_allocated(request, list(range(-(-tokens // BLOCK))), 0)
        orders = self.half.build_orders(
            SimpleNamespace(
                scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id, num_computed_tokens=0)],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
                ),
                num_scheduled_tokens={request.request_id: tokens},
                preempted_req_ids=set(),
                finished_req_ids=set(),
            )
        )
        captured = {(capture.donor_id, capture.generation) for capture in orders.captures}
        self.half.note_report(Report(served=list(orders.served), captured=captured))
        receipt = self.half.finish(request.request_id)
        return claimed, receipt.to_caller_dict()

    @property
    def donors(self):
        return [donor.donor_id for donor in self.half.semblend.donors()]


def guess(name, text, **rest):
    return Request(name, [*range(2000, 2017), *text, *range(3000, 3010)], **rest)


def test_a_guess_at_another_tenants_text_reads_the_same_whether_it_is_right_or_wrong():
    engine = Engine()
    engine.ask(Request("secret", [*range(40), *SECRET], salt="alice"))
    claims, receipts = zip(
        *(engine.ask(guess(name, text, salt="mallory")) for name, text in (("r", SECRET), ("w", range(7000, 7200)))),
        strict=True,
    )
    assert claims == (0, 0)
    right, wrong = ({k: v for k, v in r.items() if k not in ("request_id", "lookup_ms")} for r in receipts)
    assert right == wrong
    assert engine.ask(guess("own", SECRET, salt="alice"))[0] > 0, "its own text is found"


@pytest.mark.parametrize("salt", [None, ""])
def test_where_a_salt_is_required_nobody_shares_by_accident(salt):
    engine = Engine(require_cache_salt=True)
    claimed, receipt = engine.ask(Request("first", [*range(40), *SECRET], salt=salt))
    assert (claimed, receipt["reason"]) == (0, "unsupported_mode")
    assert engine.donors == []
    engine.ask(Request("salted", [*range(40), *SECRET], salt="alice"))
    assert engine.donors == ["salted"]
    assert engine.ask(guess("later", SECRET, salt=salt))[0] == 0
    assert engine.ask(guess("own", SECRET, salt="alice"))[0] > 0


def test_the_requirement_is_a_setting_of_the_connector():
    assert connector_settings({"require_cache_salt": True}, {}).require_cache_salt
    assert not connector_settings({}, {}).require_cache_salt


def test_a_callers_receipt_has_no_field_about_donors():
    engine = Engine()
    engine.ask(Request("first", [*range(40), *SECRET], salt="alice"))
    _, receipt = engine.ask(Request("second", range(5000, 5100), salt="alice"))
    assert not [name for name in receipt if any(word in name for word in DONOR_WORDS)]
    assert "first" not in str(receipt)


def test_a_public_document_behind_my_words_is_no_donor_for_another_tenant():
    engine = Engine()
    engine.ask(Request("mine", [*range(9000, 9100), *SECRET], salt="mallory"))
    assert engine.ask(guess("theirs", SECRET, salt="alice"))[0] == 0
    assert engine.ask(guess("of nobody", SECRET))[0] == 0


@pytest.mark.parametrize("asked", [{"opt_out": True}, {"quality": "exact"}])
def test_who_wants_no_influence_of_others_opts_out(asked):
    engine = Engine()
    engine.ask(Request("mine", [*range(9000, 9100), *SECRET]))
    assert engine.ask(guess("wary", SECRET, kv_transfer_params={"semblend": asked}))[0] == 0
    assert engine.ask(guess("open", SECRET))[0] > 0


def test_a_flood_of_one_salt_leaves_the_other_its_donors():
    engine = Engine(max_donors=8)
    for number in range(3):
        engine.ask(Request(f"alice-{number}", range(number * 100, number * 100 + 60), salt="alice"))
    for number in range(30):
        engine.ask(Request(f"mallory-{number}", range(9000 + number * 100, 9060 + number * 100), salt="mallory"))
    assert [name for name in engine.donors if name.startswith("alice")] == ["alice-0", "alice-1", "alice-2"]
    assert len(engine.donors) == 8
