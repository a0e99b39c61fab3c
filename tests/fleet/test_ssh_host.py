"""Hosts over SSH, against real servers."""

from __future__ import annotations

import base64
import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from islandctl.errors import ConfigError, HostKeyError, IslandError, PreflightError, UnreachableError
from islandctl.fleet import hostkeys, ssh_host, wire
from islandctl.fleet.connect import Fleet, connect
from islandctl.fleet.host import Host
from islandctl.fleet.openssh import resolve
from tests.sshd import Sshd, free_port, make_key, namespaces_work, site_profile

Start = Callable[..., Sshd]


def reach(server: Sshd, messages: list[str] | None = None, name: str | None = None, **ssh: Any) -> Host:
    """Connect; the run's own known_hosts lies beside the server's files."""
    host = server.host if name is None else name
    said = [] if messages is None else messages
    site = server.site(hosts=[host], **ssh)
    return connect(site, host, known_hosts=server.folder / "run" / "known_hosts", on_message=said.append)


def hello(host: Host) -> bytes:
    try:
        return host.run(["echo", "hello"], timeout_s=20).stdout
    finally:
        host.close()


def refused(kind: type[IslandError], server: Sshd, **settings: Any) -> IslandError:
    with pytest.raises(kind) as caught:
        hello(reach(server, **settings))
    assert type(caught.value) is kind
    assert caught.value.message.startswith("east/")
    assert caught.value.hint
    return caught.value


# Commands


@pytest.fixture(scope="module")
def host(server: Sshd) -> Any:
    host = reach(server)
    yield host
    host.close()


def test_run_gives_code_and_both_outputs(host: Host) -> None:
    done = host.run(["sh", "-c", "cat; echo trouble >&2; exit 3"], stdin=b"in\0\xff", timeout_s=20)
    assert (done.code, done.stdout, done.stderr) == (3, b"in\0\xff", b"trouble\n")


def test_a_command_killed_by_a_signal(host: Host) -> None:
    assert host.run(["sh", "-c", "kill -9 $$"], timeout_s=20).code == 137


def test_a_python_killed_by_a_signal_is_unknown_not_failed(host: Host) -> None:
    with pytest.raises(UnreachableError, match="state unknown"):
        host.python("import os\ndef main(args, payload): os.kill(os.getpid(), 9)", {}, timeout_s=20)


def test_a_missing_command(host: Host) -> None:
    assert host.run(["/no/such/thing"], timeout_s=20).code == 127


@pytest.mark.slow
def test_large_input_and_output(host: Host) -> None:
    data = bytes(range(256)) * 20_000
    assert host.run(["cat"], stdin=data, timeout_s=60).stdout == data


@pytest.mark.slow
def test_a_deadline_leaves_the_state_unknown(host: Host) -> None:
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=r"sleep gave no answer within 0.5 s; state unknown"):
        host.run(["sleep", "60"], timeout_s=0.5)
    with pytest.raises(UnreachableError, match=r"no answer within 0.5 s; state unknown"):
        host.python("import time\ndef main(args, payload): time.sleep(60)", {}, timeout_s=0.5)
    assert time.monotonic() - began < 15
    assert host.run(["echo", "still"], timeout_s=20).stdout == b"still\n"


def test_an_exception_there_names_the_host(host: Host) -> None:
    with pytest.raises(PreflightError, match=rf"{re.escape(host.label)}: ValueError: no good \(line 2\)"):
        host.python("def main(args, payload):\n    raise ValueError('no good')", {}, timeout_s=20)


def test_what_a_program_prints_is_not_its_result(host: Host) -> None:
    source = (
        "import os\ndef main(args, payload):\n    print('{}')\n    os.write(1, b'x')\n    return args, len(payload)"
    )
    assert host.python(source, {"a": "ü"}, timeout_s=20, payload=b"123") == [{"a": "ü"}, 3]


@pytest.mark.slow
def test_many_threads_share_one_connection(host: Host) -> None:
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda n: host.run(["echo", str(n)], timeout_s=60).stdout, range(24)))
    assert answers == [b"%d\n" % n for n in range(24)]


@pytest.mark.slow
def test_more_commands_than_the_server_takes_at_a_time(sshd: Start) -> None:
    host = reach(sshd(options=["MaxSessions 2"]))
    try:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda n: host.run(["echo", str(n)], timeout_s=60).stdout, range(8)))
        assert answers == [b"%d\n" % n for n in range(8)]
    finally:
        host.close()


words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@pytest.mark.slow
@settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(words, max_size=4), st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), words, max_size=3))
def test_arguments_and_values_arrive_as_they_are(host: Host, arguments: list[str], values: dict[str, str]) -> None:
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    done = host.run(["python3", "-c", program, *arguments], timeout_s=20)
    assert done.code == 0
    assert host.python("def main(args, payload): return args", {"v": values}, timeout_s=20) == {"v": values}
    assert json.loads(done.stdout) == arguments


@pytest.mark.slow
@pytest.mark.parametrize("login_shell", ["dash -c", "bash -c", "bash -lc", "sh -c"])
def test_other_login_shells(sshd: Start, login_shell: str) -> None:
    host = reach(sshd(login_shell=login_shell))
    nasty = ["echo", "-n", "a b", "$HOME", "`x`", "it's", '"', "!", "\\", "*", "~", "(", ";", "\n"]
    try:
        assert host.run(nasty, timeout_s=20).stdout == " ".join(nasty[2:]).encode()
    finally:
        host.close()


def test_noise_of_the_login_shell_is_not_data(sshd: Start) -> None:
    server = sshd(options=["Banner /etc/hostname"])
    (server.home / ".bashrc").write_text('echo hello; echo "{\\"result\\": 1}"; echo trouble >&2\n')
    assert hello(reach(server)) == b"hello\n"


def test_a_bashrc_that_leaves_early(sshd: Start) -> None:
    server = sshd()
    (server.home / ".bashrc").write_text("case $- in *i*) ;; *) return;; esac\nexport PATH=/nothing\n")
    assert hello(reach(server)) == b"hello\n"


def test_no_python_names_the_path_seen(sshd: Start) -> None:
    server = sshd(path="/nowhere")
    host = reach(server)
    with pytest.raises(
        PreflightError, match=rf"east/{server.host}: there is no python3 \(PATH there: /nowhere\)"
    ) as caught:
        hello(host)
    assert "environment.python" in caught.value.hint


def test_an_absolute_interpreter_is_used_from_the_first_command_on(sshd: Start) -> None:
    server = sshd(path="/nowhere")
    (server.home / "my python").symlink_to("/usr/bin/python3")
    site = server.site().model_copy(
        update={"environment": server.site().environment.model_copy(update={"python": "~/my python"})}
    )
    host = connect(site, server.host, known_hosts=server.folder / "kh", on_message=print)
    try:
        assert host.python("def main(args, payload): return 42", {}, timeout_s=20) == 42
    finally:
        host.close()


def test_interpreter_paths_on_any_shell() -> None:
    assert ssh_host.shell_word("/opt/py/bin/python3.11") == "/opt/py/bin/python3.11"
    assert ssh_host.shell_word("~/My Drive/python") == "~/'My Drive/python'"
    with pytest.raises(PreflightError, match="quote"):
        ssh_host.shell_word("/it's/python")


def test_after_a_loss_the_next_call_connects_again(sshd: Start) -> None:
    server = sshd()
    host = reach(server)
    host.run(["true"], timeout_s=20)
    failures: list[IslandError] = []

    def long() -> None:
        with pytest.raises(UnreachableError) as caught:
            host.run(["sleep", "60"], timeout_s=50)
        failures.append(caught.value)

    waiting = threading.Thread(target=long)
    waiting.start()
    time.sleep(0.3)
    server.drop()
    waiting.join(15)
    assert "state unknown" in failures[0].message
    with pytest.raises(UnreachableError, match="refused the connection"):
        host.run(["true"], timeout_s=20)
    server.start()
    assert hello(host) == b"hello\n"


def test_a_background_start_returns_at_once(host: Host) -> None:
    began = time.monotonic()
    pid = host.python(
        "import subprocess\ndef main(args, payload):\n    return subprocess.Popen(['sleep', '60'],"
        " stdin=-3, stdout=-3, stderr=-3, start_new_session=True).pid",
        {},
        timeout_s=20,
    )
    assert time.monotonic() - began < 5  # seconds, not the ten minutes of the child
    assert host.run(["kill", str(pid)], timeout_s=20).code == 0


def test_the_command_line_holds_nothing_that_a_shell_would_touch() -> None:
    """Inside double quotes sh, bash, zsh, csh and fish touch only these."""
    assert not set("$`\\!\"'\n") & set(wire.BOOT)


# The way there


def test_include_alias_and_odd_port(sshd: Start, tmp_path: Path) -> None:
    server = sshd()
    (tmp_path / "config.d").mkdir()
    (tmp_path / "config.d" / "east").write_text(server.alias("island-east"))
    (tmp_path / "config").write_text(f"Include {tmp_path}/config.d/*\n")
    settings = {"config": str(tmp_path / "config"), "identity": None, "known_hosts": None}
    assert hello(reach(server, name="island-east", **settings)) == b"hello\n"


def test_ipv6_with_brackets_and_port(sshd: Start) -> None:
    server = sshd(address="::1")
    assert server.host.endswith(f"@[::1]:{server.port}")
    assert hello(reach(server)) == b"hello\n"


def jump_config(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "config").write_text(text)
    return {"config": str(tmp_path / "config"), "identity": None, "known_hosts": None}


def test_jump_through_another_server(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(), sshd()
    text = bastion.alias("gate") + server.alias("node.example.com") + "Host *.example.com\n  ProxyJump gate\n"
    settings = jump_config(tmp_path, text)
    assert hello(reach(server, name="node.example.com", **settings)) == b"hello\n"
    assert "Accepted publickey" in (bastion.folder / "sshd.log").read_text()


@pytest.mark.slow
def test_jump_through_two_servers(sshd: Start, tmp_path: Path) -> None:
    outer, inner, server = sshd(), sshd(), sshd()
    text = outer.alias("outer") + inner.alias("inner") + server.alias("node", "ProxyJump outer,inner")
    settings = jump_config(tmp_path, text)
    assert [hop.alias for hop in resolve("node", server.site(hosts=["node"], **settings).ssh)] == [
        "outer",
        "inner",
        "node",
    ]
    assert hello(reach(server, name="node", **settings)) == b"hello\n"


@pytest.mark.slow
@pytest.mark.parametrize("word", ["none", "NONE"])
def test_proxyjump_none_is_no_host(sshd: Start, tmp_path: Path, word: str) -> None:
    bastion, server = sshd(), sshd()
    text = bastion.alias("gate.example.com", f"ProxyJump {word}") + server.alias("node.example.com")
    settings = jump_config(tmp_path, text + "Host *.example.com\n  ProxyJump gate.example.com\n")
    assert hello(reach(bastion, name="gate.example.com", **settings)) == b"hello\n"
    assert hello(reach(server, name="node.example.com", **settings)) == b"hello\n"


def test_what_is_typed_by_hand_goes_the_same_way(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(), sshd()
    text = bastion.alias("gate") + server.alias("node", "ProxyJump gate")
    settings = jump_config(tmp_path, text)
    gate, node = resolve("node", server.site(hosts=["node"], **settings).ssh)
    assert f"-F {tmp_path}/config" in node.by_hand
    assert (gate.by_hand.split()[-1], node.by_hand.split()[-1]) == ("gate", "node")
    server.known_hosts.write_text("")
    error = refused(HostKeyError, server, name="node", **settings)
    assert f"(ssh {node.by_hand})" in error.hint


def test_jumps_in_a_circle(sshd: Start, tmp_path: Path) -> None:
    settings = jump_config(tmp_path, "Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    with pytest.raises(ConfigError, match="ProxyJump leads in a circle: a → b → a"):
        resolve("a", site_profile("east", ["a"], settings, "~/w").ssh)


@pytest.mark.slow
def test_proxy_command(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(), sshd()
    inner = f"ssh -F {tmp_path}/config -o BatchMode=yes -W %h:%p gate"
    settings = jump_config(tmp_path, bastion.alias("gate") + server.alias("node", f"ProxyCommand {inner}"))
    assert hello(reach(server, name="node", **settings)) == b"hello\n"
    settings = jump_config(tmp_path, server.alias("node", "ProxyCommand echo the gate is shut >&2; exit 1"))
    error = refused(UnreachableError, server, name="node", **settings)
    assert "the gate is shut" in error.message


@pytest.mark.skipif(not namespaces_work(), reason="needs root and network namespaces; the ports above show the rest")
def test_a_server_in_a_network_namespace(sshd: Start) -> None:
    server = sshd(namespace=True)
    assert server.host.endswith(":22")
    host = reach(server)
    try:
        assert server.address.encode() in host.run(["ip", "-br", "address"], timeout_s=20).stdout
    finally:
        host.close()


# Host keys


def test_an_unknown_key_stops_under_strict(sshd: Start) -> None:
    server = sshd()
    server.known_hosts.write_text("")
    error = refused(HostKeyError, server)
    key = subprocess.run(
        ["ssh-keygen", "-lf", server.folder / "host_key.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    assert f"the host key of [127.0.0.1]:{server.port} is unknown: it shows ssh-ed25519 {key}" in error.message
    assert "accept-new" in error.hint
    assert f" -p {server.port} " in error.hint
    assert not (server.folder / "run" / "known_hosts").exists()


def test_accept_new_keeps_and_tells_the_key_once(sshd: Start) -> None:
    server = sshd()
    server.known_hosts.write_text("")
    messages: list[str] = []
    for _ in range(2):
        assert hello(reach(server, messages, host_keys="accept-new")) == b"hello\n"
    assert len(messages) == 1
    assert re.search(r"is new, accepted and kept in .*/run/known_hosts: ssh-ed25519 SHA256:\S{43}$", messages[0])
    assert (server.folder / "run" / "known_hosts").read_text() == server.known_hosts_line()
    assert hello(reach(server)) == b"hello\n"  # strict now finds it in the run's file


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["strict", "accept-new"])
def test_a_changed_key_stops_and_the_command_accepts_it(sshd: Start, policy: str) -> None:
    server = sshd()
    server.known_hosts.write_text(f"# a comment\n{server.known_hosts_line()}")
    server.stop()
    server.new_host_key()
    server.start()
    error = refused(HostKeyError, server, host_keys=policy)
    assert "has changed: it shows ssh-ed25519 SHA256:" in error.message
    assert f"{server.known_hosts}:2 holds" in error.message
    command = error.hint.partition(": ")[2]
    assert command == f"ssh-keygen -R '[127.0.0.1]:{server.port}' -f '{server.known_hosts}'"
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert hello(reach(server, host_keys="accept-new")) == b"hello\n"


@pytest.mark.slow
def test_a_key_of_another_kind_is_a_changed_key(sshd: Start, tmp_path: Path) -> None:
    server = sshd()
    other = make_key(tmp_path / "rsa", "rsa").with_suffix(".pub").read_text().split()[:2]
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {' '.join(other)}\n")
    assert "has changed" in refused(HostKeyError, server, host_keys="accept-new").message


@pytest.mark.slow
def test_hashed_names_patterns_and_lines_without_port(sshd: Start) -> None:
    server = sshd()
    subprocess.run(["ssh-keygen", "-H", "-f", server.known_hosts], check=True, capture_output=True)
    assert server.known_hosts.read_text().startswith("|1|")
    assert hello(reach(server)) == b"hello\n"
    key = " ".join((server.folder / "host_key.pub").read_text().split()[:2])
    for names in (f"[127.0.0.*]:{server.port}", "127.0.0.1"):
        server.known_hosts.write_text(f"{names} {key}\n")
        assert hello(reach(server)) == b"hello\n"


@pytest.mark.slow
def test_a_revoked_key_stops(sshd: Start) -> None:
    server = sshd()
    server.known_hosts.write_text(f"@revoked {server.known_hosts_line()}")
    assert "is revoked by" in refused(HostKeyError, server, host_keys="accept-new").message


@pytest.mark.slow
def test_host_key_alias(sshd: Start, tmp_path: Path) -> None:
    server = sshd()
    key = " ".join((server.folder / "host_key.pub").read_text().split()[:2])
    server.known_hosts.write_text(f"rented-7 {key}\n")
    settings = jump_config(tmp_path, server.alias("node", "HostKeyAlias rented-7"))
    assert hello(reach(server, name="node", **settings)) == b"hello\n"


@pytest.mark.slow
def test_the_key_of_a_jump_host_is_enforced_too(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(), sshd()
    settings = jump_config(tmp_path, bastion.alias("gate") + server.alias("node", "ProxyJump gate"))
    bastion.known_hosts.write_text(server.known_hosts_line().replace(str(server.port), str(bastion.port)))
    error = refused(HostKeyError, server, name="node", **settings)
    assert error.message.startswith("east/node: jump host gate: the host key of")
    assert "has changed" in error.message


def test_fingerprint_is_openssh_s(tmp_path: Path) -> None:
    public = make_key(tmp_path / "key").with_suffix(".pub")
    shown = subprocess.run(["ssh-keygen", "-lf", public], capture_output=True, text=True, check=True).stdout
    assert hostkeys.fingerprint(base64.b64decode(public.read_text().split()[1])) in shown


# Trouble


def test_a_key_that_is_not_accepted(sshd: Start, tmp_path: Path) -> None:
    server = sshd()
    stranger = make_key(tmp_path / "stranger")
    error = refused(PreflightError, server, identity=str(stranger))
    assert f"login refused for {server.user}@127.0.0.1:{server.port}: " in error.message
    assert f"{stranger} refused" in error.message
    assert "ssh -v" in error.hint


@pytest.mark.slow
def test_a_key_with_a_passphrase_says_what_to_type(sshd: Start, tmp_path: Path) -> None:
    server = sshd()
    locked = make_key(tmp_path / "locked", passphrase="secret")
    error = refused(PreflightError, server, identity=str(locked))
    assert f"{locked} needs its passphrase (type: ssh-add {locked})" in error.message


def test_a_missing_identity_file_is_named(sshd: Start) -> None:
    server = sshd()
    with pytest.raises(ConfigError, match=r"ssh\.identity: there is no file /no/such/key"):
        reach(server, identity="/no/such/key")


@pytest.mark.slow
def test_an_agent_is_used(sshd: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = sshd()
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", tmp_path / "agent"], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        while not (tmp_path / "agent").exists():
            time.sleep(0.01)
        subprocess.run(["ssh-add", "-q", server.identity], check=True, capture_output=True)
        assert hello(reach(server, identity=None)) == b"hello\n"
    finally:
        agent.terminate()
        agent.wait()


def test_a_wrong_port(server: Sshd) -> None:
    port = free_port()
    error = refused(UnreachableError, server, name=f"{server.user}@127.0.0.1:{port}")
    assert f"127.0.0.1 port {port} refused the connection" in error.message


def test_a_host_that_does_not_exist(server: Sshd) -> None:
    error = refused(UnreachableError, server, name="no-such-host.invalid")
    assert "the name no-such-host.invalid is not known" in error.message


@pytest.mark.slow
def test_a_port_that_never_greets(server: Sshd) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        error = refused(
            UnreachableError, server, name=f"x@127.0.0.1:{silent.getsockname()[1]}", connect_timeout="1 s"
        )
    assert "did not greet within 1 s" in error.message


@pytest.mark.slow
def test_a_port_that_is_no_ssh_server(server: Sshd) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def answer() -> None:
            stream, _ = other.accept()
            with stream:
                stream.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 101)
                stream.settimeout(5)
                stream.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        error = refused(UnreachableError, server, name=f"x@127.0.0.1:{other.getsockname()[1]}")
        thread.join(10)
    assert "is not an SSH server" in error.message


@pytest.mark.slow
def test_a_jump_host_that_forwards_nothing(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(options=["AllowTcpForwarding no"]), sshd()
    settings = jump_config(tmp_path, bastion.alias("gate") + server.alias("node", "ProxyJump gate"))
    error = refused(PreflightError, server, name="node", **settings)
    assert "jump host gate forwards no connections" in error.message


@pytest.mark.slow
def test_a_target_that_the_jump_host_cannot_reach(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(), sshd()
    server.stop()
    settings = jump_config(tmp_path, bastion.alias("gate") + server.alias("node", "ProxyJump gate"))
    error = refused(UnreachableError, server, name="node", **settings)
    assert f"jump host gate cannot reach 127.0.0.1 port {server.port}" in error.message


@pytest.mark.slow
def test_a_login_limit_is_waited_out(sshd: Start, tmp_path: Path) -> None:
    """MaxStartups 2: more than two logins at a time are turned away; twelve at once still come up."""
    server = sshd(options=["MaxStartups 2"])
    site = server.site()
    fleets = [Fleet(known_hosts=tmp_path / "known_hosts", on_message=print) for _ in range(12)]
    try:
        with ThreadPoolExecutor(12) as pool:
            verdicts = list(pool.map(lambda fleet: fleet.open([(site, server.host)])[0], fleets))
        assert [verdict.error for verdict in verdicts] == [None] * 12
    finally:
        for fleet in fleets:
            fleet.close()


@pytest.mark.slow
def test_a_fleet_gives_a_verdict_for_each_host_and_one_login_to_the_bastion(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(), sshd()
    names = [f"node-{n}" for n in range(6)]
    text = bastion.alias("gate") + "".join(server.alias(name, "ProxyJump gate") for name in names)
    settings = jump_config(tmp_path, text + "Host gone\n  HostName gone.invalid\n")
    site = server.site(hosts=[*names, "gone"], **settings)
    with Fleet(known_hosts=tmp_path / "known_hosts", on_message=print) as fleet:
        verdicts = fleet.open((site, name) for name in site.hosts)
        assert [verdict.error is None for verdict in verdicts] == [True] * 6 + [False]
        assert "gone.invalid" in str(verdicts[-1].error)
        assert fleet.host(site, "node-3").run(["echo", "hi"], timeout_s=20).stdout == b"hi\n"
    assert (bastion.folder / "sshd.log").read_text().count("Accepted publickey") == 1
