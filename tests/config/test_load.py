"""Files to checked values, and every way in which they can be wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from islandctl.config.budget import Budget, parse_budget
from islandctl.config.exchange import Exchange
from islandctl.config.load import load_recipe, load_site, text_hash
from islandctl.config.recipe import Recipe
from islandctl.config.schema import json_schema
from islandctl.config.site import SiteProfile
from islandctl.errors import ConfigError, UsageError

ROOT = Path(__file__).parents[2]
SITES = sorted((ROOT / "site-profiles").glob("*.yaml"))
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

SITE = """\
name: a
scheduler: ssh
hosts: [h1]
gpu: {type: cpu, count: 1, per_node: 1}
cpu: {cores: 1, memory: 1 GiB}
wan: {up: 1 Gbit/s, down: 1 Gbit/s, rtt: 1 ms}
"""
RECIPE = """\
name: r
model: {kind: dense, layers: 2, width: 16, heads: 2, hidden: 32}
data: {paths: [python-stdlib]}
training:
  steps: 10
  batch: 2
  sequence: 8
  optimizer: {lr: 1e-3}
"""


def site(tmp_path: Path, text: str) -> SiteProfile:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    return load_site(path).value


def recipe(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return load_recipe(path).value


def site_fault(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        site(tmp_path, text)
    return str(caught.value).replace(f"{tmp_path}{os.sep}", "")


def recipe_fault(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        recipe(tmp_path, text)
    return str(caught.value).replace(f"{tmp_path}{os.sep}", "")


@pytest.mark.parametrize("path", [*SITES, *RECIPES], ids=lambda path: path.stem)
def test_every_shipped_file_loads_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    load: Any = load_site if path in SITES else load_recipe
    loaded = load(path)
    assert loaded.text_hash == text_hash(path)
    dumped = loaded.value.model_dump(mode="json")
    assert type(loaded.value).model_validate(dumped) == loaded.value
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(loaded.value.model_dump(mode="json", exclude_unset=True)))
    assert load(again).value == loaded.value


def test_there_are_shipped_files() -> None:
    assert {path.stem for path in RECIPES} == {"demo", "case-study-32b", "butterfly-8"}
    assert len(SITES) == 7


def test_what_people_mean(tmp_path: Path) -> None:
    text = SITE + "region: no\nprovider: on\nenvironment: {build: false}\nssh: {port: 022}\n"
    value = site(tmp_path, text)
    assert (value.region, value.provider, value.environment.build, value.ssh.port) == ("no", "on", False, 22)


def test_a_name_may_be_a_yaml_1_1_word(tmp_path: Path) -> None:
    assert site(tmp_path, SITE.replace("name: a", "name: on")).name == "on"


def test_numbers_as_text_count_where_they_parse(tmp_path: Path) -> None:
    value = recipe(tmp_path, RECIPE.replace("1e-3", "'1.0e-3'").replace("steps: 10", "steps: '1_000'"))
    assert value.training.optimizer.lr == 1e-3
    assert value.training.steps == 1000
    assert recipe(tmp_path, RECIPE.replace("steps: 10", "steps: 1e3")).training.steps == 1000


@pytest.mark.parametrize("host", ["::1", "[::1]:2222", "u@[2001:db8::1]:2222", "fe80::1%eth0", "host:22013", "22:22"])
def test_hosts_stay_as_written(tmp_path: Path, host: str) -> None:
    quoted = f"'{host}'" if host.startswith("[") else host
    assert site(tmp_path, SITE.replace("[h1]", f"\n  - {quoted}")).hosts == (host,)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: a", "name: 8", "s.yaml:1:7: name: expected text, found the number 8; write it in quotes: '8'"),
        ("name: a", "name: true", "s.yaml:1:7: name: expected text, found true; write it in quotes: 'true'"),
        ("name: a", "name: My Site", "s.yaml:1:7: name: 'My Site' is not possible; a name takes a-z"),
        ("name: a\n", "", "s.yaml:1:1: name: key 'name' is missing"),
        ("wan: {up", "wan: {upp", "s.yaml:6:7: wan.upp: unknown key 'upp'; did you mean 'up'?"),
        ("wan: {up", "wan: {upp", "s.yaml:6:6: wan.up: key 'up' is missing"),
        ("cores: 1", "zzz: 1", "s.yaml:5:7: cpu.zzz: unknown key 'zzz'; known here: cores, memory"),
        ("ssh\n", "slrum\n", "scheduler: 'slrum' is none of: local, ssh, slurm; did you mean slurm?"),
        ("up: 1 Gbit/s", "up: 1", "s.yaml:6:11: wan.up: '1' has no unit; write for example 25 Gbit/s or 3 GB/s"),
        ("up: 1 Gbit/s", "up: 1 GBPS", "wan.up: unit 'GBPS' is ambiguous"),
        ("up: 1 Gbit/s", "up: 0 Gbit/s", "wan.up: '0 Gbit/s' is zero, which makes no sense here"),
        ("up: 1 Gbit/s", "up: 9999 Pbit/s", "s.yaml:6:11: wan.up: must be at most 1 Pbit/s"),
        ("rtt: 1 ms", "rtt: 2 h", "wan.rtt: must be at most 60 s"),
        ("rtt: 1 ms", "rtt: [1 ms]", "wan.rtt: expected a quantity with its unit"),
        ("1 GiB", "0 GiB", "cpu.memory: '0 GiB' is zero"),
        ("count: 1,", "count: true,", "s.yaml:4:25: gpu.count: expected a number, found true"),
        ("count: 1,", "count: 1.5,", "gpu.count: expected a whole number, found the number 1.5"),
        ("count: 1,", "count: one,", "gpu.count: expected a whole number, found 'one'"),
        ("count: 1,", "count: 0,", "gpu.count: 0 is too small; at least 1"),
        ("count: 1,", "count: 1e999,", "s.yaml:4:25: 1e999 is too large for a number"),
        (
            "count: 1, per_node: 1",
            "count: 12, per_node: 8",
            "s.yaml:4:25: gpu.count: count 12 is not a whole number of nodes",
        ),
        ("count: 1,", "count: 2,", "s.yaml:3:8: hosts: hosts lists 1, but gpu.count / gpu.per_node makes 2 nodes"),
        ("hosts: [h1]", "hosts: h1", "s.yaml:3:8: hosts: expected a list, found 'h1'"),
        ("hosts: [h1]", "hosts:", "hosts: expected a list, found nothing"),
        ("hosts: [h1]", "hosts: ['a b']", "hosts: host 'a b': 'a b' is no host name"),
        ("hosts: [h1]", "hosts: [h1, h1]", "hosts: host 'h1' is listed twice"),
        ("hosts: [h1]", "hosts: [1]", "s.yaml:3:9: hosts[0]: expected text, found the number 1"),
        ("hosts: [h1]\n", "", "s.yaml:2:12: scheduler: hosts lists 0, but gpu.count / gpu.per_node makes 1 nodes"),
        ("hosts: [h1]", "hosts: [h1]\nslurm: {}", "s.yaml:4:8: slurm: this section belongs to"),
        ("hosts: [h1]", "hosts: [h1]\nssh: {port: 0}", "ssh.port: 0 is too small"),
        ("hosts: [h1]", "hosts: [h1]\nssh: 22", "ssh: expected a section of keys and values, found the number 22"),
        ("hosts: [h1]", "hosts: [h1]\nssh: {config: 5}", "ssh.config: expected text, found the number 5"),
        ("hosts: [h1]", "hosts: [h1]\nenvironment: {build: maybe}", "expected true or false, found 'maybe'"),
        ("hosts: [h1]", "hosts: [h1]\nwork_dir: runs", "work_dir: 'runs' is relative"),
        ("hosts: [h1]", "hosts: [h1]\nexamined: {wan.upp: 1 B}", "s.yaml:4:11: examined: there is no wan.upp; this"),
        ("hosts: [h1]", "hosts: [h1]\nexamined: {wan.up: 1}", "examined.wan.up: expected text, found the number 1"),
        (
            "hosts: [h1]",
            "hosts: [h1]\nexamined: {wan.up: fast}",
            "examined: 'fast' is no value of wan.up; this section",
        ),
        ("hosts: [h1]", "hosts: [h1]\nexamined: {network.bandwidth: 1 B}", "examined: there is no network.bandwidth"),
        ("hosts: [h1]", "hosts: [h1]\nname: b", "s.yaml:4:1: duplicate key 'name': lines 1 and 4"),
        (
            "hosts: [h1]",
            "hosts: [h1]\nenvironment: {build: no}",
            "environment.build: expected true or false, found 'no'",
        ),
        ("hosts: [h1]", "hosts: [h1]\nenvironment: {build: 0}", "expected true or false, found the number 0"),
        ("hosts: [h1]", "hosts: [h1]\nenvironment: {build: 'true'}", "expected true or false, found 'true'"),
        ("scheduler: ssh", "scheduler: local", "s.yaml:3:8: hosts: a local site has no hosts"),
        (
            "scheduler: ssh\nhosts: [h1]",
            "scheduler: slurm\nhosts: [h1, h2]",
            "s.yaml:3:8: hosts: a slurm site lists exactly",
        ),
        (
            "scheduler: ssh\nhosts: [h1]\ngpu: {type: cpu, count: 1",
            "scheduler: local\ngpu: {type: cpu, count: 2",
            "s.yaml:3:38: gpu.per_node: a local site has one node",
        ),
    ],
)
def test_a_wrong_profile_names_place_and_cause(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SITE
    assert message in site_fault(tmp_path, SITE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1e-3", ".nan", "r.yaml:8:19: .nan is not a finite number"),
        ("1e-3", "nan", "r.yaml:8:19: training.optimizer.lr: nan is not a finite number"),
        ("1e-3", "'-inf'", "training.optimizer.lr: "),
        ("1e-3", "fast", "training.optimizer.lr: expected a number, found 'fast'"),
        ("1e-3", "-1", "training.optimizer.lr: -1 is too small; must be more than 0"),
        ("lr: 1e-3", "lr: 1e-3, betas: [0.9]", "training.optimizer.betas[1]: a value is missing"),
        (
            "lr: 1e-3",
            "lr: 1e-3, betas: [0.9, 1.0]",
            "training.optimizer.betas[1]: 1.0 is too large; must be less than",
        ),
        (
            "lr: 1e-3",
            "lr: 1e-3, block: 64",
            "r.yaml:8:32: training.optimizer.block: means nothing with kind: adamw, only with shampoo; leave it out",
        ),
        (
            "lr: 1e-3",
            "lr: 1e-3, kind: muon, refresh: 5",
            "training.optimizer.refresh: means nothing with kind: muon, only with shampoo or soap; leave it out",
        ),
        (
            "lr: 1e-3",
            "lr: 1e-3, kind: shampo",
            "'shampo' is none of: adamw, shampoo, soap, muon; did you mean shampoo?",
        ),
        ("lr: 1e-3", "lr: 1e-3, kind: shampoo, graft: sgd", "training.optimizer.graft: 'sgd' is none of: adam, none"),
        ("heads: 2", "heads: 3", "r.yaml:2:51: model.heads: width 16 is not divisible by heads 3"),
        ("kind: dense", "kind: moe", "r.yaml:2:15: model.kind: kind: moe needs experts and"),
        ("[python-stdlib]", "[]", "data.paths: at least 1 value is needed"),
        ("[python-stdlib]", "[books]", "data.paths: 'books' is relative, but sites share no current folder"),
        ("name: r", "name: r\nexchange: {windw: 50}", "exchange.windw: unknown key 'windw'; did you mean 'window'?"),
        ("name: r", "name: r\nexchange: {overlap: 50}", "r.yaml:2:21: exchange.overlap: overlap 50 must be"),
        (
            "name: r",
            "name: r\nexchange: {mode: butterfly, apply: blend}",
            "r.yaml:2:36: exchange.apply: a butterfly moves partners half-way",
        ),
        ("name: r", "name: r\nexchange: {window: 5}", "r.yaml:2:20: exchange.window: overlap 5 must be smaller"),
        (
            "hidden: 32",
            "hidden: 32, vocabulary: 100",
            "r.yaml:2:78: model.vocabulary: 100 is too small; at least 256",
        ),
        ("hidden: 32", "hidden: 32, experts: 4", "model.experts: kind: dense takes neither experts nor active"),
        ("python-stdlib]", "python-stdlib], limit_bytes: 8", "r.yaml:3:45: data.limit_bytes: 8 bytes hold no whole"),
        (
            "lr: 1e-3}",
            "lr: 1e-3}\n  schedule: {warmup: 11}",
            "r.yaml:9:22: training.schedule.warmup: a warm-up of 11 steps never ends in a training of 10",
        ),
        (
            "name: r",
            "name: r\nbudget: {cost: 500}",
            "r.yaml:2:16: budget.cost: '500' has no unit",
        ),
        ("name: r", "name: r\nbudget: {hours: 12}", "r.yaml:2:17: budget.hours: '12' has no unit"),
        ("name: r", "name: r\nbudget: {hours: 0 h}", "budget.hours: must be at least 1 s"),
        ("name: r", "name: r\nexchange: {late: {deadline: 0 s}}", "exchange.late.deadline: must be at least 1 ms"),
        (
            "name: r",
            "name: r\nexchange: {outer: {kind: average, momentum: 0.5}}",
            "exchange.outer.momentum: kind: average takes neither lr nor momentum",
        ),
        ("name: r", "name: r\nexchange: {outer: {kind: delayed}}", "exchange.outer.kind: kind: delayed needs delay"),
        ("name: r", "name: r\nexchange: {outer: {delay: 2}}", "exchange.outer.delay: kind: nesterov takes no delay"),
        (
            "name: r",
            "name: r\nexchange: {warmup: 10}",
            "r.yaml:2:20: exchange.warmup: 10 steps must be fewer than training.steps 10",
        ),
        (
            "name: r",
            "name: r\nexchange: {mode: none, warmup: 5}",
            "exchange.warmup: means nothing with mode: none: one cell trains alone; leave it out",
        ),
        (
            "name: r",
            "name: r\nexchange:\n  codec: int4\n  block: 393",
            "r.yaml:4:10: exchange.block: a block of 393 values is too long for int4 with stochastic rounding: error "
            "feedback only contracts when n - 1 < 8 L² (L = 7), so at most 392",
        ),
        (
            "name: r",
            "name: r\nexchange: {rounding: stochastic, codec: 2bit}",
            "r.yaml:2:22: exchange.rounding: 2bit rounds to nearest only",
        ),
        ("name: r", "name: r\nexchange: {codec: bf16, block: 64}", "exchange.block: bf16 has no scales"),
        (
            "name: r",
            "name: r\nexchange: {codec: int4, block: 1}",
            "exchange.block: 1 is too small",
        ),
        ("name: r", "name: r\nexchange: {feedback: 1.5}", "exchange.feedback: "),
        ("name: r", "name: r\nrelay: {host: 'a b'}", "relay.host: host 'a b'"),
        (
            "name: r",
            "name: r\nworker: {env: {A: 1}}",
            "worker.env.A: expected text, found the number 1; write it in q",
        ),
        ("name: r", "name: r\nevaluation: {every: ~}", "evaluation.every: expected a whole number, found nothing"),
    ],
)
def test_a_wrong_recipe_names_place_and_cause(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in RECIPE
    assert message in recipe_fault(tmp_path, RECIPE.replace(old, new))


def test_what_the_codec_leaves_open(tmp_path: Path) -> None:
    def exchange(text: str) -> Exchange:
        return recipe(tmp_path, RECIPE.replace("name: r", f"name: r\nexchange: {{{text}}}")).exchange

    assert exchange("codec: int4").beta == 1.0
    assert exchange("codec: 2bit").beta == 0.95
    assert exchange("codec: 2bit, feedback: 90 %").beta == 0.9
    assert exchange("codec: int4, block: 392").block == 392
    assert exchange("codec: int4, rounding: nearest, block: 4096").block == 4096


def test_all_faults_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = SITE.replace("name: a", "nam: a").replace("1 GiB", "1").replace("rtt: 1 ms", "rtt: 1")
    lines = site_fault(tmp_path, text).split("\n")
    assert [line.split(": ")[1] for line in lines] == ["nam", "name", "cpu.memory", "wan.rtt"]


def test_pydantic_is_not_heard(tmp_path: Path) -> None:
    text = site_fault(tmp_path, SITE.replace("name: a", "name: [1]").replace("up: 1 Gbit/s", "up: 5"))
    assert "Value error" not in text
    assert "Input should" not in text
    assert "pydantic" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "s.yaml: the file is empty"),
        (b"name: a\nx: \xff", "s.yaml:2: not UTF-8"),
        (b"- a", "s.yaml:1:1: expected"),
    ],
)
def test_files_that_are_no_profile(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_site(path)
    assert message in str(caught.value)
    assert caught.value.hint


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_site(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_recipe(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe("a\0b")
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="longer than 1024 KiB"):
        load_recipe(big)
    assert text_hash(tmp_path / "none.yaml") is None


def test_ssh_files_lie_beside_the_profile(tmp_path: Path) -> None:
    value = site(tmp_path, SITE + "ssh: {config: keys/config, identity: ~/.ssh/id, known_hosts: /etc/hosts.known}\n")
    assert value.ssh.config == str(tmp_path / "keys" / "config")
    assert value.ssh.identity == "~/.ssh/id"
    assert value.ssh.known_hosts == "/etc/hosts.known"


def test_the_place_of_a_value(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SITE)
    loaded = load_site(path)
    assert loaded.at("gpu", "count") == f"{path}:4:25"
    assert loaded.at("ssh", "port") == f"{path}:1:1"


def test_a_profile_in_the_recipes_place_is_one_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"r\.yaml: is a site profile, where a recipe belongs\n"):
        recipe(tmp_path, SITE)
    with pytest.raises(ConfigError, match=r"s\.yaml: is a recipe, where a site profile belongs\n"):
        site(tmp_path, RECIPE)


def test_every_key_says_what_it_means() -> None:
    for kind in ("site", "recipe"):
        schema = json_schema(kind)
        for part in (schema, *schema["$defs"].values()):
            for key, item in part["properties"].items():
                meant = item.get("description") or "$ref" in str(item)
                assert meant, f"{kind}: {key} has no meaning"


def test_a_budget_in_a_recipe_and_on_the_command_line(tmp_path: Path) -> None:
    value = recipe(tmp_path, RECIPE + "budget: {cost: 500 USD, hours: 12 h}\n").budget
    assert (value.cost, value.hours) == (500.0, 43200.0)
    assert not recipe(tmp_path, RECIPE).budget.limited
    assert parse_budget("24 h") == Budget(hours="24 h")  # type: ignore[arg-type]
    assert parse_budget("800 USD") == Budget(cost="800 USD")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--budget '24' is neither a time nor"):
        parse_budget("24")
