"""What a relay is told: settings, tokens and certificate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography import x509

from islandctl.config.exchange import Late
from islandctl.config.recipe import Emulate
from islandctl.errors import ConfigError
from islandctl.relay.certificate import make_certificate, write_certificate
from islandctl.relay.settings import RelaySettings, read_settings
from islandctl.relay.tokens import Tokens, token_hash


def test_settings_survive_their_file(tmp_path: Path) -> None:
    settings = RelaySettings(
        run="tale",
        config_hash="c",
        cells=("usa", "asia"),
        num_fragments=4,
        late=Late(deadline="2 min", then="alone"),
        seeded=True,
        emulate=Emulate(bandwidth="1 Gbit/s", rtt="140 ms"),
    )
    (tmp_path / "relay.json").write_text(settings.model_dump_json())
    read = read_settings(tmp_path)
    assert (read.late, read.seeded, read.emulate) == (settings.late, True, settings.emulate)
    assert read.key == tmp_path / "key.pem"
    absolute = settings.model_copy(update={"key": Path("/elsewhere/key.pem")})
    (tmp_path / "relay.json").write_text(absolute.model_dump_json())
    assert read_settings(tmp_path).key == Path("/elsewhere/key.pem")


def test_wrong_settings_name_file_and_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"relay\.json: No such file"):
        read_settings(tmp_path)
    (tmp_path / "relay.json").write_text('{"run": "tale", "portt": 1}')
    with pytest.raises(ConfigError, match=r"relay\.json: config_hash"):
        read_settings(tmp_path)


def test_roles() -> None:
    tokens = Tokens({token_hash("a"): "controller", token_hash("b"): "0"}, 1)
    assert tokens.role(b"Bearer a") == "controller"
    assert tokens.role(b"bearer b") == 0
    for wrong in (
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer c",
        b"Basic a",
        b"a",
        b"Bearer " + token_hash("a").encode(),
        b"\xff",
    ):
        assert tokens.role(wrong) is None


@pytest.mark.parametrize("role", ["2", "-1", "root", "", "٣"])
def test_unknown_roles_are_refused(role: str) -> None:
    with pytest.raises(ConfigError, match="neither 'controller' nor a cell"):
        Tokens({token_hash("a"): role}, 2)


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": "0"}'])
def test_a_wrong_tokens_file_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="tokens"):
        Tokens.read(path, 2)


def test_the_tokens_file_holds_no_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({token_hash("secret"): "1"}))
    assert "secret" not in path.read_text()
    assert Tokens.read(path, 2).role(b"Bearer secret") == 1


def test_a_certificate_holds_names_and_addresses(tmp_path: Path) -> None:
    names = ["relay.example.org", "127.0.0.1", "::1", "[2001:db8::1]"]
    _, pem = make_certificate(names, common_name="x" * 200)
    held = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert held.get_values_for_type(x509.DNSName) == ["relay.example.org"]
    assert [str(each) for each in held.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1", "2001:db8::1"]
    write_certificate(tmp_path / "key", tmp_path / "cert", names, common_name="x")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_certificate(tmp_path / "key", tmp_path / "cert", names, common_name="x")
