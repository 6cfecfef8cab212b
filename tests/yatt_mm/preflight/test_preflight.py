"""Tests that faults are reported before anything heavy starts."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from tests.dataplane.tables import verl_table, write_lines, write_parquet
from tests.yatt_mm import runs
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import Config, load_config
from yatt_mm.preflight.host_checks import check_hosts
from yatt_mm.preflight.overlap import files_in_both
from yatt_mm.preflight.run_checks import check_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preflight")
    runs.write_shard(path / "train-000000.tar", range(4))
    runs.write_shard(path / "eval-000000.tar", range(4, 8))
    (path / "text.tar").write_text("this is no tar file")
    (path / "notes.txt").write_text("these are notes")
    (path / "empty.tar").write_bytes(bytes(10240))
    return path


def config_of(folder: Path, model: Path, *overrides: str) -> Config:
    config, *rest = runs.arguments(folder, model, "preflight", "train.steps=1", *overrides)
    return load_config(runs.ROOT / config, rest)


def check(folder: Path, model: Path, *overrides: str) -> None:
    check_run(config_of(folder, model, *overrides))


def test_a_good_config_passes(folder: Path, tiny_dir: Path) -> None:
    check(folder, tiny_dir)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=/no/such/folder", "no such folder; wanted a Hugging Face folder with config.json"),
        ("data.train=/no/such-*.tar", "no file matches"),
        ("data.train={folder}/notes.txt", "notes.txt is of no known format"),
        ("data.train={folder}/text.tar", "cannot read the shard"),
        ("data.eval={folder}/empty.tar", "is empty"),
        ("reward.function=no_such_module:f", "cannot import no_such_module"),
        ("train.parallel.tp=3", "ranks, but placement.num_devices is 2"),
        ("train.parallel.ep=2", "has no experts, so set parallel.ep=1"),
        ("algorithm.overlong_buffer=4", "overlong_buffer is 4 and rollout.max_tokens 3; the first is the end of the"),
        (
            "reference.path=/no/such/folder",
            "nothing reads it; set algorithm.kl.where to loss or reward, or leave it out",
        ),
        ("critic.lr=0.1", "critic.lr is 0.1, and nothing reads it: the advantages of grpo compare responses with each"),
        ("rollout.max_model_len=2049", "max_model_len is 2049 and the model has 2048 positions"),
        ("rollout.num_engines=3", "an engine needs devices of its own"),
        ("train.num_minibatches=9", "a minibatch needs at least one prompt"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, tiny_dir: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(folder, tiny_dir, override.format(folder=folder))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ("verdict=regex", "max_tokens=256", "max_model_len=256"),
            "the second holds what the judge reads and its answer",
        ),
        (("max_model_len=2049",), "reward.judges.own.max_model_len is 2049 and the model has 2048 positions"),
        (
            (f"yes_words={[f'yes{n}' for n in range(20)]}",),
            "24 words mean yes or no, and an engine tells of at most 20",
        ),
        (("template=What is it?",), "the template does not name {response}"),
        (("template=''",), "the template does not name {response}"),
        (("template='{response:d}'",), "the template has a name with a format or a conversion"),
        (("template='{response!r}'",), "the template has a name with a format or a conversion"),
        (("pattern=([0-9])",), "it is read with verdict regex, and verdict is yes_no; leave it out"),
        (("verdict=json", "pattern=([0-9])"), "it is read with verdict regex, and verdict is json"),
        (("scale=10",), "it is read with verdict regex or json, and verdict is yes_no"),
        (
            ("no_words=['most certainly not']",),
            "none of 'most certainly not' is a single token of the judge's tokenizer",
        ),
        (("yes_words=[]",), "the words that mean yes are []; name one at least"),
        (("no_words=['no','yes']",), "'yes' means both yes and no"),
        (("no_words=[no]",), "write 'yes' and 'no' with quotes"),
        (("api_key_env=JUDGE_KEY",), "api_key_env is JUDGE_KEY, but it has no url"),
        (("url=http://host/v1", "api_key_env=NO_SUCH_KEY"), "NO_SUCH_KEY, which is not set in the environment"),
        (("max_outage_s=5",), "max_outage_s is 5.0, but it has no url; leave it out"),
        (("deadline_s=5",), "deadline_s is 5.0, but it has no url; leave it out"),
        (
            ("url=http://host/v1", "max_outage_s=241"),
            "reward.judges.own.max_outage_s is 241, but controllers wait for a call of controllers.deadline_s (300 s) "
            "at most, and 0.8 of that is 240 s; lower max_outage_s or raise controllers.deadline_s",
        ),
        (("url=http:///v1",), "the address in reward.judges.own.url names no host; give it up to and including"),
        (("url=http://host:70000/v1",), "the address in reward.judges.own.url has a host or a port that is none"),
        (("url=http://[host/v1",), "the address in reward.judges.own.url has a host or a port that is none"),
        (("url=http://host/v1?api-version=1",), "has a query or a fragment, and paths are put behind it"),
    ],
)
def test_a_judge_that_could_not_judge_is_named(
    folder: Path, tiny_dir: Path, changes: tuple[str, ...], message: str
) -> None:
    judge = [f"reward.judges.own.{change}" for change in (f"model={tiny_dir}", "num_engines=2", *changes)]
    with pytest.raises(ConfigError) as caught:
        check(folder, tiny_dir, "reward.judges.own.max_model_len=1024", *judge)
    assert message in str(caught.value)


def test_a_key_that_no_header_can_hold_is_named_and_not_told(
    folder: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = ("reward.judges.away.url=http://host/v1", "reward.judges.away.model=judge")
    monkeypatch.setenv("JUDGE_KEY", "secret\n")
    check(folder, tiny_dir, *judge, "reward.judges.away.api_key_env=JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "open\nsesame")
    with pytest.raises(ConfigError, match="JUDGE_KEY, which is set to what cannot stand in a header") as caught:
        check(folder, tiny_dir, *judge, "reward.judges.away.api_key_env=JUDGE_KEY")
    assert "sesame" not in str(caught.value)
    with pytest.raises(
        ConfigError, match=r"has a name or a password before the host, .* in reward\.judges\.away\.api_"
    ) as caught:
        check(folder, tiny_dir, *judge, "reward.judges.away.url=http://me:sesame@host/v1")
    assert "sesame" not in str(caught.value)


def test_a_judge_may_not_be_called_as_a_role(folder: Path, tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match="a judge is called train, as a role is; call it something else"):
        check(folder, tiny_dir, f"reward.judges.train.model={tiny_dir}")


def test_a_judge_elsewhere_needs_neither_a_folder_nor_a_device(folder: Path, tiny_dir: Path) -> None:
    judge = ("reward.judges.away.url=http://host:8000/v1", "reward.judges.away.model=judge")
    check(folder, tiny_dir, *judge, "reward.judges.away.num_engines=3")
    partial = (*judge, "placement.mode=partial_colocation")
    check(folder, tiny_dir, *partial)
    check(folder, tiny_dir, *partial, "placement.dynamic=false")
    with pytest.raises(ConfigError, match=r"placement\.rollout_devices is 1, but all judges are servers elsewhere"):
        check(folder, tiny_dir, *partial, "placement.rollout_devices=1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["placement.num_devices=4", "rollout.tp=2", "rollout.num_engines=3"], "is 6 devices, but placement.num_dev"),
        (["placement.num_devices=3", "rollout.tp=3"], "rollout.tp is 3 and the model has 4 attention heads"),
        (["{judge}", "reward.judges.a.num_engines=3"], "reward.judges.*.num_engines x tp is 3 devices"),
        (["{judge}", "reward.judges.a.tp=3"], "reward.judges.a.tp is 3 and the model has"),
        (["{partial}", "placement.num_devices=3", "rollout.tp=2"], "placement.num_devices is 3 and rollout.tp 2"),
        (
            ["{partial}", "placement.num_devices=4", "rollout.tp=2", "placement.min_genrm_devices=1"],
            "placement.min_genrm_devices is 1 and rollout.tp 2; the first must be a multiple",
        ),
        (["{partial}", "rollout.tp=2", "placement.dynamic=false"], "rollout and judges need at least one each"),
        (["{partial}", "placement.min_rollout_devices=2"], "which leaves the other role none for ever"),
        (["{partial}", "placement.min_genrm_devices=2"], "which leaves the other role none for ever"),
        (
            ["{partial}", "placement.rollout_devices=2", "placement.min_genrm_devices=1"],
            "placement.rollout_devices is 2 of 2 devices, but placement.min_rollout_devices is 0",
        ),
        (["placement.min_genrm_devices=1"], "in placement.mode=full_colocation every role has all devices in turn"),
        (["placement.rollout_devices=1"], "in placement.mode=full_colocation every role has all devices in turn"),
        (["rollout.deterministic=true", "sampling.tail=continue"], "sampling.tail is continue, which goes by what is"),
        (["rollout.deterministic=true", "sampling.over_dispatch=1.5"], "sampling.over_dispatch is 1.5, which goes by"),
    ],
)
def test_engines_that_do_not_fit_the_devices_are_named(
    folder: Path, tiny_dir: Path, overrides: list[str], message: str
) -> None:
    judge = [f"reward.judges.a.model={tiny_dir}", "reward.judges.a.max_model_len=1024"]
    partial = [*judge, "placement.mode=partial_colocation", "rollout.deterministic=false"]
    places = {"{judge}": judge, "{partial}": partial}
    with pytest.raises(ConfigError) as caught:
        check(folder, tiny_dir, *(given for name in overrides for given in places.get(name, [name])))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("num_devices=4", "devices_per_host=3"),
            "num_devices is 4 and placement.devices_per_host 3; every host gives as",
        ),
        (("devices_per_host=1",), "the run needs 2 hosts, but ray.address is not set; start Ray on the hosts"),
        (("devices_per_host=1", "dataplane.uri=grpc://a:1"), "dataplane.uri names one node, and a run over 2 hosts"),
        (("devices_per_host=1", "weights.carrier=nccl"), "whose members meet in files of one host"),
        (
            ("devices_per_host=1", "rollout.tp=2", "rollout.num_engines=1"),
            "engine 0 would have devices 0 to 1 .rollout.tp is 2., which are on two hosts",
        ),
        (
            ("devices_per_host=2", "num_devices=4", "train.parallel.tp=4"),
            "stay within a host; the nearest layout that does is tp 2 and pp 2",
        ),
    ],
)
def test_what_cannot_be_divided_among_hosts_is_named(
    folder: Path, tiny_dir: Path, overrides: tuple[str, ...], message: str
) -> None:
    given = [one if "." in one.partition("=")[0] else f"placement.{one}" for one in overrides]
    address = [] if "ray.address" in message else ["ray.address=10.0.0.1:6379"]
    with pytest.raises(ConfigError, match=message):
        check_hosts(config_of(folder, tiny_dir, *given, *address))


def test_one_host_needs_no_cluster(folder: Path, tiny_dir: Path) -> None:
    check_hosts(config_of(folder, tiny_dir, "placement.devices_per_host=2"))
    check_hosts(config_of(folder, tiny_dir, "placement.devices_per_host=1", "ray.address=auto"))


def test_a_division_begins_within_its_bounds(folder: Path, tiny_dir: Path) -> None:
    judge = [f"reward.judges.a.model={tiny_dir}", "placement.mode=partial_colocation", "placement.num_devices=4"]
    config, *rest = runs.arguments(folder, tiny_dir, "preflight", "train.steps=1", *judge)
    for bounds, first in ((), "2+2"), (("min_rollout_devices=3",), "3+1"), (("min_genrm_devices=3",), "1+3"):
        given = [f"placement.{bound}" for bound in bounds]
        division = load_config(runs.ROOT / config, [*rest, *given]).division()
        assert division is not None and str(division.first) == first
    for is_replacing in (True, False):
        given = [f"sampling.replace_groups={str(is_replacing).lower()}"]
        division = load_config(runs.ROOT / config, [*rest, *given]).division()
        assert division is not None and division.is_replacing is is_replacing


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot be read (Expecting property name"), ("[]", "holds a list; wanted the JSON obj")]
)
def test_a_broken_config_json_is_named(folder: Path, tiny_dir: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        check(folder, tiny_dir, f"model.path={tmp_path}")
    assert message in str(caught.value)


def test_a_classifier_without_a_head_is_named(folder: Path, tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.judges\.a: model .* has no tensor score\.weight"):
        own = (f"reward.judges.a.model={tiny_dir}", "reward.judges.a.max_model_len=1024")
        check(folder, tiny_dir, *own, "reward.judges.a.verdict=classifier")
    with pytest.raises(ConfigError, match=r"reward\.judges\.a\.model is /no/such: no such folder"):
        check(folder, tiny_dir, "reward.judges.a.model=/no/such", "reward.judges.a.verdict=classifier")


def test_parquet_json_lines_and_folders_pass_too(folder: Path, tiny_dir: Path) -> None:
    (folder / "tables").mkdir()
    write_parquet(folder / "tables" / "a.parquet", verl_table([[]]))
    write_lines(folder / "a.jsonl", [{"question": "?", "answer": "!"}])
    for pattern in ("tables/*.parquet", "a.jsonl", "tables", "tables/a.parquet#drop=extra_info"):
        check(folder, tiny_dir, f"data.train={folder}/{pattern}")


def test_a_layout_that_the_model_does_not_allow_is_named(folder: Path, tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"attention heads|layers"):
        check(folder, tiny_dir, "placement.num_devices=3", "train.parallel.tp=3")


def test_the_command_line_says_it_in_one_line(folder: Path, tiny_dir: Path) -> None:
    done = runs.run(runs.arguments(folder, tiny_dir, "x", "train.stepz=1"))
    assert done.status == 2
    assert done.output.strip().endswith("train.stepz is not a known key; did you mean train.steps?")


def test_a_run_folder_that_cannot_be_written_is_told(
    folder: Path, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_file").write_text("")
    with pytest.raises(ConfigError, match=r"run.dir is .*: /.*/a_file is a file; wanted a folder"):
        check(folder, tiny_dir, f"run.dir={tmp_path}/a_file/runs")
    check(folder, tiny_dir, f"run.dir={tmp_path}/new/runs")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=rf"run.dir is .*: {tmp_path} cannot be written"):
        check(folder, tiny_dir, f"run.dir={tmp_path}/new/runs")


def test_a_disk_without_room_for_a_checkpoint_is_told(
    folder: Path, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(ConfigError, match=r"its disk has 1 MB free, and a checkpoint .* takes 11 MB at least"):
        check(folder, tiny_dir, f"run.dir={tmp_path}")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=20_000_000))
    check(folder, tiny_dir, f"run.dir={tmp_path}")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("tokenizer.json", r"has no tokenizer \(tokenizer.json or vocab.json or tokenizer.model\)"),
        (
            "chat_template.jinja",
            r"has no chat template for its tokenizer \(chat_template.jinja, or chat_template in tokenizer_config",
        ),
        ("model.safetensors", "has no .safetensors file"),
    ],
)
def test_a_model_folder_without_one_of_its_files_is_told(
    missing: str, message: str, folder: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model, ignore=shutil.ignore_patterns(missing))
    with pytest.raises(ConfigError, match=f"model.path {model} {message}"):
        check(folder, model)


def test_weights_that_are_not_safetensors_are_told(folder: Path, tiny_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    for content in (b"no weights", b"\x02" + bytes(7) + b"[]"):
        (model / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=r"model.path: .*model.safetensors is no safetensors file"):
            check(folder, model)


def test_held_out_files_among_the_training_files_are_found_also_as_copies(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "eval-000000.tar", tmp_path / "another_name.tar")
    held_out = f"{folder}/eval-*.tar"
    assert files_in_both(f"{folder}/*-000000.tar", held_out) == [f"{folder}/eval-000000.tar"]
    assert files_in_both(f"{tmp_path}/*.tar", held_out) == [f"{folder}/eval-000000.tar"]
    assert files_in_both(f"{folder}/train-*.tar", held_out) == []


def test_a_gzipped_file_is_told_with_the_remedy(folder: Path, tiny_dir: Path, tmp_path: Path) -> None:
    packed = tmp_path / "train.tar.gz"
    packed.write_bytes(gzip.compress((folder / "train-000000.tar").read_bytes()))
    with pytest.raises(ConfigError, match=r"train.tar.gz is of no known format .*; unpack it with gunzip"):
        check(folder, tiny_dir, f"data.train={packed}")


def test_weights_that_end_early_are_told(folder: Path, tiny_dir: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_dir, tmp_path / "model"))
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    message = f"model.path: {weights} is incomplete: {len(whole) - 1} bytes of {len(whole)}; download or copy it again"
    with pytest.raises(ConfigError, match=message):
        check(folder, tiny_dir, f"model.path={model}")


def test_a_reference_needs_the_architecture_of_the_policy(folder: Path, tiny_dir: Path, tmp_path: Path) -> None:
    reference, loss = Path(shutil.copytree(tiny_dir, tmp_path / "reference")), "algorithm.kl.where=loss"
    check(folder, tiny_dir, loss, f"reference.path={reference}")
    file = reference / "config.json"
    hf_config = json.loads(file.read_text())
    text = dict(hf_config["text_config"])  # as older versions of transformers write it
    rope = text.pop("rope_parameters")
    flat = text | {"rope_theta": rope["rope_theta"], "rope_scaling": {"mrope_section": rope["mrope_section"]}}
    others = {name: value for name, value in hf_config.items() if name != "text_config"}
    file.write_text(json.dumps(flat | others | {"transformers_version": "4.51"}))
    check(folder, tiny_dir, loss, f"reference.path={reference}")
    file.write_text(json.dumps(flat | others | {"rope_theta": 5e5}))
    with pytest.raises(ConfigError, match=r"config.json has text_config.rope_theta 500000.0, where .* has 1000000.0"):
        check(folder, tiny_dir, loss, f"reference.path={reference}")
    hf_config["text_config"]["num_hidden_layers"] += 1
    file.write_text(json.dumps(hf_config))
    found, wanted = (hf_config["text_config"]["num_hidden_layers"] - less for less in (0, 1))
    message = f"text_config.num_hidden_layers {found}, where that of model.path has {wanted}"
    with pytest.raises(ConfigError, match=message):
        check(folder, tiny_dir, loss, f"reference.path={reference}")
    with pytest.raises(ConfigError, match=r"reference\.path is /no/such: no such folder"):
        check(folder, tiny_dir, loss, "reference.path=/no/such")


def test_a_critic_needs_the_architecture_of_the_policy(folder: Path, tiny_dir: Path, tmp_path: Path) -> None:
    critic, ppo = Path(shutil.copytree(tiny_dir, tmp_path / "critic")), "algorithm.name=ppo"
    clip = "algorithm.clip_high=null"
    check(folder, tiny_dir, ppo, clip)
    check(folder, tiny_dir, ppo, clip, f"critic.path={critic}", "critic.lr=1e-4")
    with pytest.raises(
        ConfigError, match=r"critic.path is .*/critic, and nothing reads it: .* set algorithm.name to ppo"
    ):
        check(folder, tiny_dir, f"critic.path={critic}")
    with pytest.raises(ConfigError, match=r"critic\.path is /no/such: no such folder"):
        check(folder, tiny_dir, ppo, clip, "critic.path=/no/such")
    file = critic / "config.json"
    hf_config = json.loads(file.read_text())
    hf_config["text_config"]["num_hidden_layers"] += 1
    file.write_text(json.dumps(hf_config))
    with pytest.raises(ConfigError, match=r"critic.path is .* has text_config.num_hidden_layers .* a critic needs the"):
        check(folder, tiny_dir, ppo, clip, f"critic.path={critic}")


def test_the_disk_must_have_room_for_the_critic_too(
    folder: Path, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(file.stat().st_size for file in tiny_dir.glob("*.safetensors"))  # 4 bytes a parameter, and a header
    free = type(shutil.disk_usage(tmp_path))(10 * size, 0, 4 * size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    check(folder, tiny_dir)
    with pytest.raises(ConfigError, match="a checkpoint of this model takes"):
        check(folder, tiny_dir, "algorithm.name=ppo", "algorithm.clip_high=null")


def test_weights_that_lora_freezes_need_less_room(
    folder: Path, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(file.stat().st_size for file in tiny_dir.glob("*.safetensors"))  # 4 bytes a parameter, and a header
    for dtype, num_bytes in (("float32", 4), ("bfloat16", 2)):
        given = (f"model.dtype={dtype}", "train.lora.rank=4")
        free = type(shutil.disk_usage(tmp_path))(10 * size, 0, int(num_bytes / 4 * size))
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: free)
        check(folder, tiny_dir, *given)
        free = free._replace(free=int(0.9 * free.free))
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: free)
        with pytest.raises(ConfigError, match="a checkpoint of this model takes"):
            check(folder, tiny_dir, *given)


def test_where_checkpoints_and_their_copies_cannot_be_written_is_told(
    folder: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "a_file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint.dir is .*: /.*/a_file is a file; wanted a folder"):
        check(folder, tiny_dir, f"checkpoint.dir={tmp_path}/a_file/x")
    with pytest.raises(ConfigError, match=r"checkpoint.copy_to is .*/a_file: a file cannot be written there"):
        check(folder, tiny_dir, f"checkpoint.copy_to={tmp_path}/a_file")
    with pytest.raises(ConfigError, match=r"checkpoint.copy_to is nowhere://x: .*not known: nowhere"):
        check(folder, tiny_dir, "checkpoint.copy_to=nowhere://x")
    check(folder, tiny_dir, f"checkpoint.dir={tmp_path}/fast", f"checkpoint.copy_to=file://{tmp_path}/copies")
    assert not list((tmp_path / "copies").iterdir()), "the trial leaves nothing"
