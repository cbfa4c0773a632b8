"""Keys from a file, from variables and from flags: who they make of a caller, and what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from semblend.cli.commands import serve
from semblend.cli.main import build_parser
from semblend.config import read_key_variables
from semblend.engine.server.config import ServeConfig
from semblend.engine.server.tenants import Tenants, read_keys_file, read_pairs
from semblend.errors import ConfigError
from semblend.wire.errors import ApiError

DIGEST = hashlib.sha256(b"sk-bolt").hexdigest()
FILE = f"""
[[keys]]
tenant = "acme"
key = "sk-acme"

[[keys]]
tenant = "bolt"
key_sha256 = "{DIGEST}"

[[keys]]
admin = true
key = "sk-root"
"""


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_a_file_makes_tenants_and_admins_of_its_keys_and_of_their_digests(tmp_path):
    ring = read_keys_file(write(tmp_path / "keys.toml", FILE))
    tenants = Tenants(ring=ring.keys)
    assert tenants.identify("sk-acme").tenant == "acme"
    assert tenants.identify("sk-bolt").tenant == "bolt"
    assert tenants.identify("sk-root").admin
    for wrong in ("sk-other", DIGEST, ""):
        with pytest.raises(ApiError):
            tenants.identify(wrong)
    assert ring.warnings == ()


def test_a_file_that_others_may_read_is_a_warning_and_one_that_others_may_change_an_error(tmp_path):
    path = write(tmp_path / "keys.toml", FILE, 0o644)
    (warning,) = read_keys_file(path).warnings
    assert "chmod 600" in warning
    path.chmod(0o660)
    with pytest.raises(ConfigError, match="give themselves keys"):
        read_keys_file(path)


@pytest.mark.parametrize(
    "text",
    [
        "keys = 5",
        "[keys]\nacme = 'sk-acme'",
        FILE + "\n[other]\n",
        "[[keys]]\ntenant = 'acme'",
        "[[keys]]\nkey = 'sk-acme'",
        "[[keys]]\ntenant = 'acme'\nadmin = true\nkey = 'sk-acme'",
        "[[keys]]\ntenant = 'acme'\nkey = 'sk-acme'\nkey_sha256 = '00'",
        "[[keys]]\ntenant = 'acme'\nkey_sha256 = 'sk-acme'",
        "[[keys]]\ntenant = 'acme'\nkey = ''",
        "[[keys]]\ntenant = 5\nkey = 'sk-acme'",
        "[[keys]]\ntenant = 'acme'\nkey = 'sk-acme'\nadministrator = true",
        "[[keys]]\nadmin = 'yes'\nkey = 'sk-acme'",
        "[[keys]\n",
        "\x80",
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused_without_showing_a_key(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        Tenants(ring=read_keys_file(write(tmp_path / "keys.toml", text)).keys)
    assert caught.value.hint
    assert "sk-acme" not in str(caught.value)


@pytest.mark.parametrize("path", ["missing.toml", "."])
def test_a_file_that_is_not_there_is_told_with_its_name(tmp_path, path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys_file(tmp_path / path)


def test_a_key_that_is_given_twice_is_refused(tmp_path):
    ring = read_keys_file(write(tmp_path / "keys.toml", FILE)) + read_pairs(["other=sk-bolt"], [], "--api-key")
    with pytest.raises(ConfigError, match="twice"):
        Tenants(ring=ring.keys)


def config(*words: str) -> ServeConfig:
    return serve._make_config(build_parser(["serve"]).parse_args(["serve", *words]))


def test_file_variables_and_flags_add_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SEMBLEND_API_KEYS", "cora=sk-cora  dora=sk-dora")
    monkeypatch.setenv("SEMBLEND_ADMIN_KEYS", "sk-boss")
    tenants = config("--keys-file", str(write(tmp_path / "keys.toml", FILE)), "--api-key", "eve=sk-eve=1").tenants
    named = {key: tenants.identify(key).tenant for key in ("sk-acme", "sk-bolt", "sk-cora", "sk-dora", "sk-eve=1")}
    assert list(named.values()) == ["acme", "bolt", "cora", "dora", "eve"]
    assert tenants.identify("sk-boss").admin
    warnings = capsys.readouterr().err
    assert "other users of this machine can see keys" in warnings
    assert "sk-eve" not in warnings


def test_keys_from_a_private_file_or_a_variable_need_no_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SEMBLEND_API_KEYS", "cora=sk-cora")
    config("--keys-file", str(write(tmp_path / "keys.toml", FILE)))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("pairs", ["acme", "=sk-acme", "acme="])
def test_a_pair_without_a_tenant_or_a_key_is_refused_wherever_it_comes_from(monkeypatch, pairs):
    monkeypatch.setenv("SEMBLEND_API_KEYS", pairs)
    with pytest.raises(ConfigError, match="TENANT=KEY") as caught:
        config()
    assert "sk-acme" not in str(caught.value)


def test_without_variables_there_are_no_keys():
    assert read_key_variables({}) == ((), ())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "server.example"])
def test_a_server_beyond_this_machine_needs_keys_a_front_or_the_word_of_its_operator(host):
    with pytest.raises(ConfigError, match="everyone admin") as caught:
        config("--host", host)
    assert "--insecure-open" in caught.value.hint
    assert not config("--host", host, "--api-key", "acme=sk-acme").local_only
    assert not config("--host", host, "--trusted-front", "10.0.0.0/8").tenants.is_open
    assert config("--host", host, "--insecure-open").tenants.is_open


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_server_on_this_machine_needs_none(host):
    assert config("--host", host).local_only
