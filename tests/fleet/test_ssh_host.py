"""Hosts over SSH, against real servers."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import islandctl
from islandctl.errors import IslandError, PreflightError, UnreachableError
from islandctl.fleet import ssh_host, wire
from islandctl.fleet.connect import connect
from islandctl.fleet.host import Host
from islandctl.fleet.scheduler import PlainHosts, Seat
from tests.fleet.reaching import Start, hello, reach
from tests.sshd import SHELLS, Sshd, namespaces_work

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
@pytest.mark.parametrize("login_shell", [*(f"{name} -c" for name in SHELLS), "bash -lc"])
def test_any_login_shell_with_a_motd(sshd: Start, login_shell: str) -> None:
    server = sshd(login_shell=login_shell)
    noise = ("bashrc", "bash_profile", "zshenv", "tcshrc", "cshrc", "config/fish/config.fish")
    for name in noise:
        (server.home / f".{name}").parent.mkdir(parents=True, exist_ok=True)
        (server.home / f".{name}").write_text("echo Welcome to node-7\n")
    host = reach(server)
    nasty = ["echo", "-n", "a b", "$HOME", "`x`", "it's", '"', "!", "\\", "*", "~", "(", ";", "\n"]
    try:
        assert host.run(nasty, timeout_s=20).stdout == " ".join(nasty[2:]).encode()
    finally:
        host.close()
    for name in noise:
        assert (server.home / f".{name}").read_text() == "echo Welcome to node-7\n"


PATHS = st.text(st.characters(exclude_characters="'!\\\n\r\0", exclude_categories=["Cs"]), min_size=1, max_size=12)


@pytest.mark.slow
@settings(
    max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(PATHS, min_size=20, max_size=40))
def test_interpreter_paths_in_real_shells(tmp_path: Path, rests: list[str]) -> None:
    show = tmp_path / "show"
    show.write_text(f"#!{sys.executable} -I\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    show.chmod(0o755)
    paths = [prefix + rest for rest in rests for prefix in ("/", "~/")]
    words = " ".join(ssh_host.shell_word(path) for path in paths)
    for shell in SHELLS:
        done = subprocess.run(
            [shell, "-c", f"exec {show} {words}"],
            env={"HOME": "/the/home", "PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
            capture_output=True,
            check=True,
        )
        assert json.loads(done.stdout) == [
            "/the/home" + path[1:] if path.startswith("~/") else path for path in paths
        ], shell


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
        PreflightError, match=rf"east/{server.host}: cannot run python3: .* not found \(PATH there: /nowhere\)"
    ) as caught:
        hello(host)
    assert "environment.python" in caught.value.hint


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("exec sh", "the login shell there does not run the command that it is given: sh: "),
        ("read -r answer", "something on that host reads what is meant for python3"),
    ],
)
def test_a_bashrc_that_takes_over_is_told_as_such(sshd: Start, line: str, words: str) -> None:
    server = sshd()
    (server.home / ".bashrc").write_text(line + "\n")
    with pytest.raises(PreflightError) as caught:
        hello(reach(server))
    assert caught.value.message.startswith(f"east/{server.host}: {words}")
    assert caught.value.hint


@pytest.mark.slow
def test_a_bashrc_that_swallows_everything_is_told_before_a_slow_python_would_be(sshd: Start) -> None:
    server = sshd()
    (server.home / ".bashrc").write_text("echo Welcome\nexec cat > /dev/null\n")
    with pytest.raises(PreflightError) as caught:  # and not that Python gave no answer, a minute later
        reach(server).python("def main(args, payload): return 42", {}, timeout_s=60)
    assert caught.value.message == (
        f"east/{server.host}: the login shell there does not run the command that it is given: no answer within 35 s"
    )


@pytest.mark.slow
@pytest.mark.parametrize("interpreter", ["python3", sys.executable])  # the one that stays, and one for a call
def test_fish_in_a_bare_locale_finds_a_home_with_an_accent(sshd: Start, interpreter: str) -> None:
    server = sshd(login_shell="fish -c", home="Hélène", variables={"LC_ALL": "C"})
    source = "import os\ndef main(args, payload): return os.path.expanduser('~')"
    host = reach(server)
    try:
        assert host.python(source, {}, timeout_s=60, interpreter=interpreter) == str(server.home)
    finally:
        host.close()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exec /opt/missing/python3 $@", "exec: /opt/missing/python3: not found"),
        ("exit 3", "my python gave no answer (exit code 3): no output"),
        ("exec python3 $*", "my python gave no answer (exit code 1): SyntaxError"),
    ],
)
def test_a_broken_interpreter_is_named_with_what_it_says(sshd: Start, script: str, words: str) -> None:
    server = sshd()
    (server.home / "my python").write_text(f"#!/bin/sh\n{script}\n")
    (server.home / "my python").chmod(0o755)
    environment = server.site().environment.model_copy(update={"python": f"{server.home}/my python"})
    site = server.site().model_copy(update={"environment": environment})
    host = connect(site, server.host, known_hosts=server.folder / "kh", on_message=print)
    try:
        with pytest.raises(PreflightError) as caught:
            host.python("def main(args, payload): return 42", {}, timeout_s=60)
    finally:
        host.close()
    assert words in caught.value.message
    assert "my python" in caught.value.message


def test_a_bashrc_that_leaves_something_running_which_prints(sshd: Start) -> None:
    server = sshd()
    (server.home / ".bashrc").write_text("(for i in $(seq 100); do echo tick; sleep 0.02; done) &\n")
    host = reach(server)
    for _ in range(20):
        assert hello(host) == b"hello\n"


@pytest.mark.skipif(not namespaces_work(), reason="makes a network namespace, which only root may do")
def test_nodes_without_a_way_out_meet_where_ssh_comes_in(sshd: Start) -> None:
    server = sshd(namespace=True)
    host = reach(server)
    assert host.run(["ip", "route", "show", "default"], timeout_s=60.0).stdout == b""
    seat = Seat(host=host, python="python3", code="", supervisor="", folder="", num_ranks=1)
    assert PlainHosts().address(seat) == server.address
    asked = {"do": "addresses", "setup": []}
    told = host.python(wire.program("checks/on_node"), asked, timeout_s=60.0)
    assert (told["routed"], told["came_in"]) == ([], [server.address])


def test_no_more_processes_is_told_with_what_to_do(sshd: Start) -> None:
    host = reach(sshd())
    refused = "import os\ndef main(args, payload): raise BlockingIOError(11, os.strerror(11))"
    with pytest.raises(PreflightError, match="Resource temporarily unavailable") as caught:
        host.python(refused, {}, timeout_s=60)
    assert "ulimit -u" in caught.value.hint


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


def test_nothing_asks_for_root() -> None:
    """No command line of the product begins with sudo or docker; hints to a person may name them."""
    found = [
        f"{path}:{words.lineno}: {first.value}"
        for path in Path(islandctl.__file__).parent.rglob("*.py")
        for words in ast.walk(ast.parse(path.read_text()))
        if isinstance(words, ast.List | ast.Tuple) and words.elts
        for first in words.elts[:1]
        if isinstance(first, ast.Constant) and first.value in ("sudo", "su", "doas", "docker", "podman")
    ]
    assert found == []
