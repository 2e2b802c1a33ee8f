"""Which files of a folder of code travel: those that git would take, and nothing that tools write."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.errors import ConfigError
from trainyard.run_file.code.code_archive import pack
from trainyard.run_file.code.code_files import files_of

FILES = (
    "main.py", "a.txt", "b.txt", "c d.txt", "end ", "#hash", "!bang", "é.txt", "A.TXT", "deep/a.txt",
    "deep/b.txt", "deep/er/a.txt", "deep/er/keep.txt", "data/a.bin", "data/keep/a.bin", "logs/x.log",
    "logs/deep/x.log", "src/logs/x.log", "src/data/a.bin", "foo/bar", "x/foo/bar", "x1", "x2", "[b]",
    "back\\slash", "tab\tname",
)  # fmt: skip

RULES: tuple[bytes, ...] = (
    b"a.txt\n", b"/a.txt\n", b"*.txt\n!b.txt\n", b"deep/\n", b"deep\n", b"/deep/er\n",
    b"deep/er/\n!deep/er/keep.txt\n", b"deep/er/*\n!deep/er/keep.txt\n", b"data/*\n!data/keep\n",
    b"data/*\n!data/keep/\n", b"**/logs\n", b"logs/**\n", b"**/a.txt\n", b"deep/**/a.txt\n",
    b"*\n!*.py\n", b"*\n!*/\n!*.txt\n", b"/*\n!/deep\n", b"foo\n", b"/foo\n", b"foo/bar\n", b"foo/*\n",
    b"x?\n", b"x[12]\n", b"x[!1]\n", b"x[1\n", b"\\[b]\n", b"c d.txt\n", b"c\\ d.txt\n", b"end \n",
    b"end\\ \n", b"a.txt   \n", b"a.txt\t\n", b"  a.txt\n", b"#hash\n", b"\\#hash\n", b"!bang\n",
    b"\\!bang\n", b"!\na.txt\n", b"!!a.txt\n", b"\\\na.txt\n", b"/\na.txt\n",
    b"\xef\xbb\xbfa.txt\nb.txt\n", b"a.txt\r\nb.txt\r\n", b"\xef\xbb\xbf# words\r\na.txt\r\n",
    b"a.txt\r", b"a.txt", b"a.txt\x0bb.txt\n", b"a.txt\x0cb.txt\n", "é.txt\n".encode(),
    b"\xff.txt\na.txt\n", b"*.TXT\n", b"***\n", b"**\n", b"**/\n", b"/**\n!main.py\n", b"a/**/b\n",
    b"deep/**\n!deep/a.txt\n", b"logs\n!logs/x.log\n", b"*.log\n!x.log\n", b"back\\\\slash\n",
    b"tab\tname\n", b"deep//a.txt\n", b"./a.txt\n", b"deep/./a.txt\n", b"[[:alpha:]].txt\n", b"x[1-2]\n",
    b"x[^1]\n", b"*/a.txt\n", b"*/*/a.txt\n", b"[!a].txt\n", b"?.txt\n", b"??.txt\n", b"/****/bar\n",
    b"deep/***/a.txt\n", b"deep**/\n", b"deep**//\n", b"deep**/a.txt\n", b"d*p**/a.txt\n", b"[x-A]1\n",
)  # fmt: skip

WORDS = (
    "*", "**", "***", "?", "/", "//", "a", "b", "x", "deep", "er", "data", "foo", "bar", ".txt", ".bin",
    "logs", "1", "\u00e9", ".", "[a-c]", "[c-a]", "[!a]", "[]ab]", "[^x]", "[a\\]b]", "[--0]", "[x-]", "[!]]",
    "[[:alnum:]]", "[[:upper:]x]", "[[:none:]]", "[a-[:digit:]]", "[a-", "\\", "\\*", "\\ ", " ", "#", "!",
    "**/", "/**", "/**/",
)  # fmt: skip
LINES = st.builds(
    lambda words, before, after: f"{before}{''.join(words)}{after}",
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=6),
    st.sampled_from(("", "", "!")),
    st.sampled_from(("", "", "/", " ")),
)


def tree(root: Path) -> Path:
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def files_of_git(folder: Path) -> list[str]:
    listed = subprocess.run(
        ["git", "-c", "core.excludesFile=/dev/null", "ls-files", "-z"]
        + ["--others", "--cached", "--exclude-standard"],
        cwd=folder,
        capture_output=True,
        check=True,
    )
    return sorted(name.decode() for name in listed.stdout.split(b"\0") if name)


def git_init(folder: Path) -> None:
    subprocess.run(["git", "init", "-q", str(folder)], check=True, capture_output=True)


def ours(folder: Path) -> list[str]:
    return sorted(map(str, files_of(folder)))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tree(tmp_path_factory.mktemp("repository"))
    git_init(root)
    return root


@pytest.mark.parametrize("rules", RULES, ids=repr)
def test_gitignore_is_read_as_git_reads_it(repository: Path, rules: bytes) -> None:
    (repository / ".gitignore").write_bytes(rules)
    assert ours(repository) == files_of_git(repository)


@pytest.mark.ci
@settings(max_examples=300, deadline=None)
@given(
    lines=st.lists(LINES, min_size=1, max_size=4),
    end=st.sampled_from(("\n", "\r\n")),
    mark=st.sampled_from((b"", b"\xef\xbb\xbf")),
)
def test_made_up_rules_are_read_as_git_reads_them(
    repository: Path, lines: list[str], end: str, mark: bytes
) -> None:
    (repository / ".gitignore").write_bytes(mark + "".join(line + end for line in lines).encode())
    assert ours(repository) == files_of_git(repository)


def test_rules_of_folders_above_and_below_and_of_the_repository_are_read(tmp_path: Path) -> None:
    code = tree(tmp_path / "project/src")
    git_init(tmp_path / "project")
    (tmp_path / "project/.gitignore").write_text("*.bin\n/src/x1\n!/src/foo\n")
    (tmp_path / "project/.git/info/exclude").write_text("x2\nfoo\n")
    (code / "deep/.gitignore").write_text("!er/\nb.txt\n/er/a.txt\n")
    (code / "data/.gitignore").write_text("!keep/a.bin\n")
    assert ours(code) == files_of_git(code)
    assert "x1" not in ours(code)
    assert "data/keep/a.bin" in ours(code)


def test_rules_above_do_not_hide_the_folder_that_a_run_names(tmp_path: Path) -> None:
    code = tree(tmp_path / "project/out/src")
    git_init(tmp_path / "project")
    (tmp_path / "project/.gitignore").write_text("out/\n")
    assert "main.py" in ours(code)


@pytest.mark.parametrize(
    ("names", "marker"),
    [
        ("__pycache__/a.pyc", ""), (".pytest_cache/v", ""), (".ruff_cache/0", ""), (".mypy_cache/a", ""),
        (".venv/bin/python", ""), ("env/bin/python", "env/pyvenv.cfg"), ("wandb/run-1/a", ""),
        ("mlruns/0/meta.yaml", ""), ("lightning_logs/version_0/a", ""),
        ("runs/digits/model.pt", "runs/digits/run.json"),
        ("elsewhere/digits/logs/a.log", "elsewhere/digits/run.json"), ("own.egg-info/PKG-INFO", ""),
        ("build/lib/a.py", "pyproject.toml"), ("tool/cache/a", "tool/cache/CACHEDIR.TAG"), (".git", ""),
        (".ipynb_checkpoints/a.ipynb", ""), ("node_modules/a/b.js", ""),
    ],
)  # fmt: skip
def test_what_programs_write_stays_behind(tmp_path: Path, names: str, marker: str) -> None:
    content = "Signature: 8a477f597d28d172789f06886806bc55" if marker.endswith("TAG") else ""
    for name in filter(None, ("main.py", names, marker)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    if marker.endswith("run.json"):
        (tmp_path / marker).with_name("attempts.jsonl").write_text("")
    kept = ["main.py", "pyproject.toml"] if marker == "pyproject.toml" else ["main.py"]
    assert ours(tmp_path) == kept


@pytest.mark.parametrize(
    "name", ["wandb/__init__.py", "build/model.py", "runs/config.py", "env/a.py"]
)
def test_a_package_of_the_same_name_travels(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("")
    assert ours(tmp_path) == [name]


# Credentials. They are put together here, so that no scanner takes them for real ones.
LETTERS = "aB3dE6gH9jK2mN5pQ8sT"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (".env", "A=1"), (".env.local", ""), ("deep/.env", ""), (".netrc", ""), ("id_rsa", ""),
        (".git-credentials", ""), (".aws/credentials", ""), (".kube/config", ""), (".ssh/key", ""),
        ("key.pem", "-----BEGIN " + "PRIVATE KEY-----"), ("store.p12", ""), ("kubeconfig", ""),
        ("account.json", '{"private_key": "-----BEGIN ' + 'PRIVATE KEY-----\\n"}'),
        (".npmrc", "//registry/:_authToken=npm_" + (LETTERS * 2)[:36]),
        (".pypirc", "[pypi]\npassword = pypi-" + LETTERS),
        ("main.py", 'TOKEN = "hf_' + LETTERS + '"'),
        ("main.py", "x = 1\nkey = 'AKIA" + "ABCDEFGHIJKLMNOP'"),
        ("main.py", 'client = Client(api_key="' + LETTERS + '")'),
        ("main.py", "openai.key = 'sk-" + LETTERS + "'"),
        ("note.ipynb", '{"source": ["os.environ[\\"GH_TOKEN\\"] = \\"ghp_' + LETTERS + '\\""]}'),
        ("run.sh", "export AWS_SECRET_ACCESS_KEY=" + LETTERS * 2),
        ("config.yaml", "wandb_api_key: " + LETTERS * 2),
        ("db.py", "create_engine('postgresql://me:" + LETTERS + "@db/x')"),
        ("kaggle.json", '{"username": "me", "key": "0123456789abcdef0123456789abcdef"}'),
        ("train.py", "wandb.login(key='" + LETTERS * 2 + "')"), ("main.py", "k = 'nvapi-" + LETTERS + "'"),
        ("main.py", 'headers = {"Authorization": "Bearer ' + LETTERS + '"}'), (".databrickscfg", ""),
        (".streamlit/secrets.toml", ""), ("prod.env", "DB_PASSWORD=" + "hunter2"),
        ("secrets.yaml", "db:\n  password: " + "hunter2"), ("deep/secrets.json", '{"token":"' + 'abc"}'),
        ("main.py", 'AZURE_STORAGE_KEY = "' + LETTERS * 4 + '=="'),
        ("main.py", "post('https://hooks.slack.com/services/T0/B0/" + LETTERS + "')"),
    ],
)  # fmt: skip
def test_code_with_a_credential_is_refused_with_its_file_and_the_remedy(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    (tmp_path / "other.py").write_text("")
    with pytest.raises(ConfigError) as raised:
        pack(tmp_path)
    shown = str(raised.value)
    assert f"{name}: " in shown
    assert ".gitignore" in shown
    assert LETTERS not in shown
    (tmp_path / ".gitignore").write_text(f"/{name}\n")
    assert pack(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (".env.example", "AWS_SECRET_ACCESS_KEY=\nHF_TOKEN=<your token>"),
        ("cert.pem", "-----BEGIN CERTIFICATE-----\nMIIE"),
        ("id_rsa.pub", "ssh-rsa AAAA"),
        ("main.py", "token = os.environ['HF_TOKEN']\ntoken = tokenizer.convert_ids_to_tokens(ids)"),
        ("main.py", 'tokenizer.pad_token = "<|endoftext|>"\nmask_token = "extra_id_0000000001"'),
        ("main.py", "api_key = config.api_key_of_the_service_2()"),
        ("main.py", "# see https://user:password@example.com\nmax_tokens = 1024"),
        ("main.py", "parser.add_argument('--password', help='the password of the user')"),
        ("sk-learn-contrib.md", "install sk-learn-contrib-something"),
        ("tokenizer.json", '{"token": "hello", "eos_token": "</s>", "num_tokens": 50257}'),
        ("weights.bin", "\0 AKIA" + "ABCDEFGHIJKLMNOP"),
        (".npmrc", "registry=https://registry.example.com/"),
        ("training.env", "OMP_NUM_THREADS=4\nHF_TOKEN=${HF_TOKEN}\nPAD_TOKEN=<pad>\nMAX_TOKENS=10"),
        ("secrets.yaml", "password: $(PASSWORD)\ntoken: {{ token }}\nname: storage"),
        (
            "main.py",
            "# the bearer authenticates_with_a_token\nstorage_key = 'primary_store_of_data'",
        ),
        ("secrets.py", "import secrets\ntoken = secrets.token_hex(16)"),
    ],
)
def test_ordinary_code_is_no_credential(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert pack(tmp_path)


def test_a_credential_in_utf_16_is_found(tmp_path: Path) -> None:
    # PowerShell's `>` writes such files.
    (tmp_path / "note.txt").write_bytes(f"hf_{LETTERS}".encode("utf-16"))
    with pytest.raises(ConfigError, match=r"note\.txt: line 1 contains a Hugging Face token"):
        pack(tmp_path)
