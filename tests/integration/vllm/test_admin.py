"""An operator's commands to a running engine: whose donors, in which thread, and who may ask."""

from __future__ import annotations

import json
import socket
import stat
import threading

import pytest

from semblend import Namespace, Prompt, SemBlend, SemBlendConfig
from semblend.cli.main import main
from semblend.errors import SemBlendError
from semblend.integration.vllm.scheduler import admin
from semblend.integration.vllm.scheduler.admin import AdminSocket, DonorAdmin, DonorCommand, ask, find_sockets
from semblend.prompt import name_tenant

SALTS = {"a": "salt of a", "b": "salt of b", "": ""}


class Engine:
    """A store of donors, and a scheduler thread that works off commands when it is told to."""

    def __init__(self, patience_s=0.05):
        self.semblend = SemBlend(SemBlendConfig(metrics=False, embedder="none"))
        for number, tenant in enumerate(["a", "a", "b", ""]):
            namespace = Namespace(salt=SALTS[tenant], tenant=name_tenant(SALTS[tenant]))
            self.semblend.register(
                Prompt(range(number * 100, number * 100 + 50), namespace=namespace), f"donor-{number}"
            )
        self.did = []
        self.desk = DonorAdmin(self.semblend, self.act, patience_s=patience_s)

    def act(self, action, donor_id):
        self.did.append((action, donor_id, threading.current_thread().name))
        return self.semblend.forget(donor_id) if action == "forget" else self.semblend.pin(donor_id)

    def step_until(self, thread):
        while thread.is_alive():
            self.desk.work_off()


@pytest.fixture
def engine():
    return Engine()


def asked(engine, **command):
    """The answer to a command while the engine steps."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(engine.desk.answer(command)), name="operator")
    engine.desk._patience_s = 30
    thread.start()
    engine.step_until(thread)
    return answers[0]


def test_donors_are_listed_by_tenant_and_no_salt_is_shown(engine):
    everything = engine.desk.answer({"action": "list"})
    assert [donor["donor_id"] for donor in everything["donors"]] == ["donor-3", "donor-2", "donor-1", "donor-0"]
    assert "salt of" not in json.dumps(everything)
    of_a = engine.desk.answer({"action": "list", "tenant": name_tenant(SALTS["a"])})
    assert [donor["donor_id"] for donor in of_a["donors"]] == ["donor-1", "donor-0"]
    without = engine.desk.answer({"action": "list", "tenant": ""})
    assert [donor["donor_id"] for donor in without["donors"]] == ["donor-3"]
    counted = {row["tenant"]: row["donors"] for row in engine.desk.answer({"action": "tenants"})["tenants"]}
    assert counted == {name_tenant(SALTS["a"]): 2, name_tenant(SALTS["b"]): 1, "": 1}


def test_a_list_is_cut_to_the_newest(engine):
    shown = engine.desk.answer({"action": "list", "limit": 2})
    assert [donor["donor_id"] for donor in shown["donors"]] == ["donor-3", "donor-2"]
    assert shown["total"] == 4


def test_forgetting_a_tenant_leaves_the_others_and_runs_in_the_schedulers_thread(engine):
    answer = asked(engine, action="forget", tenant=name_tenant(SALTS["a"]))
    assert answer == {"ok": True, "action": "forget", "donors": 2, "queued": False}
    assert [donor.donor_id for donor in engine.semblend.donors()] == ["donor-2", "donor-3"]
    assert {thread for _, _, thread in engine.did} == {threading.main_thread().name}


def test_an_idle_engine_says_so_and_does_it_later(engine):
    answer = engine.desk.answer({"action": "forget", "everything": True})
    assert (answer["donors"], answer["queued"]) == (4, True)
    assert len(engine.semblend.donors()) == 4
    engine.desk.work_off()
    assert engine.semblend.donors() == ()


def test_a_failure_is_told_to_the_operator_and_not_to_the_scheduler(engine):
    engine.desk._act = lambda action, donor_id: 1 / 0
    answer = asked(engine, action="pin", donor_id="donor-1")
    assert not answer["ok"]
    assert "ZeroDivisionError" in answer["error"]


@pytest.mark.parametrize(
    "command",
    [
        None,
        [],
        {},
        {"action": "explode"},
        {"action": "forget"},
        {"action": "forget", "tenant": "x", "everything": True},
        {"action": "forget", "tenant": "x", "donor_id": "y"},
        {"action": "forget", "everything": "yes"},
        {"action": "list", "limit": True},
        {"action": "list", "tenant": 7},
        {"action": "list", "secret": 1},
    ],
)
def test_a_command_that_is_none_changes_nothing_and_has_a_hint(engine, command):
    answer = engine.desk.answer(command)
    engine.desk.work_off()
    assert not answer["ok"]
    assert answer["hint"]
    assert len(engine.semblend.donors()) == 4


def test_only_a_command_about_a_tenant_means_those_without_a_salt():
    donor = SemBlend(SemBlendConfig(metrics=False, embedder="none")).register(Prompt(range(50)), "x")
    assert DonorCommand("forget", tenant="").chooses(donor)
    assert not DonorCommand("forget", tenant="0" * 16).chooses(donor)


@pytest.fixture
def served(engine, tmp_path):
    door = AdminSocket(tmp_path / "admin.sock", engine.desk.answer)
    yield door
    door.close()


def test_the_socket_is_its_users_alone_and_goes_when_the_engine_ends(served):
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o600
    assert ask(served.path, {"action": "list"})["total"] == 4
    served.close()
    assert not served.path.exists()
    with pytest.raises(SemBlendError, match="no engine answers"):
        ask(served.path, {"action": "list"})


def test_another_user_is_turned_away(served, monkeypatch):
    monkeypatch.setattr(admin, "_is_operator", lambda caller: False)
    answer = ask(served.path, {"action": "list"})
    assert not answer["ok"]
    assert "donors" not in answer


@pytest.mark.parametrize(
    "sent", [b"", b"\n", b"not json\n", b"[" * 30_000 + b"\n", b"x" * (1 << 17) + b"\n", b"\xff\n"]
)
def test_noise_on_the_socket_costs_one_caller_nothing_but_its_call(served, sent):
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(served.path))
        try:
            line.sendall(sent)
            line.shutdown(socket.SHUT_WR)
            line.recv(1 << 16)
        except OSError:
            pass  # it hung up while we were still talking
    assert ask(served.path, {"action": "list"})["ok"]


def test_engines_of_one_machine_have_a_socket_each_and_a_dead_ones_is_taken_over(engine, tmp_path):
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    first, second = (AdminSocket(path, engine.desk.answer) for _ in range(2))
    assert [first.path.name, second.path.name] == ["admin.sock", "admin.sock.1"]
    assert find_sockets(path) == [first.path, second.path]
    first.close()
    second.close()
    assert find_sockets(path) == []


def test_a_file_that_is_no_socket_is_not_removed(engine, tmp_path):
    path = tmp_path / "admin.sock"
    path.write_text("mine")
    door = AdminSocket(path, engine.desk.answer)
    door.close()
    assert path.read_text() == "mine"


def test_the_command_lists_and_forgets_in_every_engine(served, engine, tmp_path, capsys):
    where = ["--socket", str(tmp_path / "admin.sock")]
    assert main(["vllm", "donors", *where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engines"][0]["total"] == 4
    (tmp_path / "salt").write_text("salt of a\n")
    assert main(["vllm", "donors", "forget", *where, "--salt-file", str(tmp_path / "salt")]) == 0
    assert "before its next request" in capsys.readouterr().out
    engine.desk.work_off()
    assert [donor.donor_id for donor in engine.semblend.donors()] == ["donor-2", "donor-3"]
    assert main(["vllm", "donors", "tenants", *where]) == 0
    shown = capsys.readouterr().out
    assert name_tenant(SALTS["b"]) in shown
    assert "salt of" not in shown


@pytest.mark.parametrize(
    "words", [["forget"], ["pin", "--tenant", "x", "--all"], ["list", "--tenant", "x", "--salt-file", "-"]]
)
def test_the_command_wants_to_know_which_donors(served, tmp_path, capsys, words):
    assert main(["vllm", "donors", *words, "--socket", str(tmp_path / "admin.sock")]) == 2
    assert "hint:" in capsys.readouterr().err


def test_without_an_engine_the_command_says_what_to_do(tmp_path, capsys):
    assert main(["vllm", "donors", "--socket", str(tmp_path / "none")]) == 2
    assert "admin_socket" in capsys.readouterr().err
