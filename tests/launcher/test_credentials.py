"""A plain credential in a run file is refused wherever it stands, is not shown, and nothing else is."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainyard.errors import ConfigError
from trainyard.run_file.credentials import credential_in, credentials, refuse_credentials
from trainyard.run_file.load import load_run

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples/digits.yaml"

# Put together here, so that no scanner of this repository takes them for real ones.
LETTERS = "aB3dE6gH9jK2mN5pQ8sT"
PLAIN = {
    "a private key": "-----BEGIN " + "RSA PRIVATE KEY-----\nMIIE",
    "a URL with a password": "https://user:" + "hunter2@host/path",
    "a signed URL": "https://bucket/key?X-Amz-Signature=" + "0123456789abcdef",
    "an AWS access key": "AKIA" + "ABCDEFGHIJKLMNOP",
    "a GitHub token": "ghp_" + LETTERS * 2,
    "a GitLab token": "glpat-" + LETTERS,
    "a Hugging Face token": "hf_" + LETTERS * 2,
    "an API key": "sk-" + LETTERS * 2,
    "a Google API key": "AIza" + (LETTERS * 2)[:35],
    "a Slack token": "xoxb-" + "123456789012-abc",
    "an npm token": "npm_" + (LETTERS * 2)[:36],
    "a Docker token": "dckr_pat_" + LETTERS,
    "a JSON web token": "eyJ" + LETTERS + ".eyJ" + LETTERS + "." + LETTERS,
    "a bearer token": "Authorization: Bearer " + LETTERS,
    "an Azure key": "DefaultEndpointsProtocol=https;AccountKey=" + LETTERS + "==",
    "an assigned secret": "AWS_SECRET_ACCESS_KEY=" + "hunter2hunter2",
    "what looks like an AWS secret key": LETTERS * 2,
}


@pytest.mark.parametrize(("what", "text"), PLAIN.items(), ids=PLAIN)
def test_each_kind_is_known_by_its_shape(what: str, text: str) -> None:
    assert credential_in(text) == what


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("password", "hunter2"),
        ("wandb_api_key", "0123456789abcdef"),
        ("HF_TOKEN", "abc"),
        ("s3-secret-key", "abc"),
        ("secret", "abc"),
    ],
)
def test_a_key_tells_what_its_value_is(key: str, text: str) -> None:
    assert list(credentials({"train": {key: text}})) == [(f"train.{key}", f"the value of {key}")]


def test_an_option_of_a_command_tells_what_follows_it() -> None:
    command = ["python", "train.py", "--api-key", "hunter2", "--epochs", "3", "--token=abc"]
    assert [path for path, _ in credentials({"command": command})] == ["command[3]", "command[6]"]


@pytest.mark.parametrize("text", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("key", ["data.source", "image", "data.ray_nodes.zone", "name", "unknown"])
def test_it_is_refused_in_any_value_of_a_run_and_never_shown(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")) as raised:
        load_run(DIGITS, [f"{key}={yaml.safe_dump(text).removesuffix('...' + chr(10))}"])
    shown = str(raised.value)
    assert "plain credential" in shown
    assert "Secret" in shown
    assert text not in shown
    assert text[-8:] not in shown


def test_it_is_refused_in_the_file_with_all_others(tmp_path: Path) -> None:
    document = yaml.safe_load(DIGITS.read_text())
    document["data"]["endpoint"] = PLAIN["a URL with a password"]
    document["data"]["ray_nodes"] = {PLAIN["a GitHub token"]: "a"}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match="2 plain credentials") as raised:
        load_run(path)
    assert "data.endpoint: contains a URL with a password" in str(raised.value)
    assert "data.ray_nodes: contains a GitHub token" in str(raised.value)
    assert LETTERS not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("source", "s3://bucket/prefix/with/many/parts"),
        ("source", "/mnt/data/Pictures2024/cats/and/dogs/abc1"),
        ("source", "/mnt/" + "aB3" * 12 + "d"),
        ("endpoint", "http://minio.storage:9000"),
        ("endpoint", "http://user@host:9000/path"),
        ("image", "registry.example.com:5000/ml/trainyard:1"),
        ("image", "trainyard@sha256:" + "0123456789abcdef" * 4),
        ("commit", "0123456789abcdef0123456789abcdef01234567"),
        ("password", "$PASSWORD"),
        ("token", "${HF_TOKEN}"),
        ("token", "<token>"),
        ("token", "/var/run/secrets/token"),
        ("token", ""),
        ("api_key", "null"),
        ("tokenizer", "bert-base-uncased"),
        ("secretName", "storage-credentials"),
        ("max_tokens", "4096"),
        ("mask_token", "[MASK]"),
        ("cls_token", "[CLS]"),
        ("eos_token", "<|im_end|>"),
        ("token", "<|im_start|>"),
        ("bos_token", "start_of_text"),
        ("pad_token", "!"),
        ("unk_token", "\u2581"),
        ("image_token", "image"),
        ("command", "train.py --pad_token=PAD --eos-token=[EOS] --mask_token extra_id_0"),
        ("command", "python train.py --token=$HF_TOKEN --max-tokens=4096"),
        ("command", "python train.py --tokenizer=gpt2 --key=value"),
        ("function", "package.module:train"),
        ("name", "resnet18-sk-learn-akia"),
    ],
)
def test_an_ordinary_value_raises_no_alarm(key: str, text: str) -> None:
    assert credential_in(text, key) is None


@pytest.mark.parametrize(
    "file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.stem
)
def test_no_example_raises_an_alarm(file: Path) -> None:
    refuse_credentials(yaml.safe_load(file.read_text()), str(file))


words = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=12)
paths = st.lists(words, min_size=1, max_size=6).map("/".join)
ordinary = st.one_of(
    words,
    paths,
    paths.map(lambda path: f"/mnt/{path}"),
    paths.map(lambda path: f"s3://{path}"),
    st.builds(
        lambda host, port, path: f"https://{host}:{port}/{path}",
        words,
        st.integers(1, 65535),
        paths,
    ),
    st.builds(lambda name, tag: f"registry:5000/{name}:{tag}", paths, words),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.dates().map(str),
    st.text("0123456789abcdef", min_size=40, max_size=64),
)
KEYS = ["name", "source", "endpoint", "model", "epochs", "image", "zone", "tokenizer", "max_tokens"]
trees = st.recursive(
    ordinary,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(trees)
def test_ordinary_documents_raise_no_alarm(tree: Any) -> None:
    assert list(credentials(tree)) == []


@given(trees, st.sampled_from(sorted(PLAIN.values())), st.text(" ,;", max_size=2))
def test_one_credential_is_found_wherever_it_stands(tree: Any, text: str, around: str) -> None:
    document = {"data": [tree, {"zone": f"{around}{text}{around}"}]}
    assert [path for path, _ in credentials(document)] == ["data[1].zone"]
