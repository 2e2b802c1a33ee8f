"""Run file -> RunConfig: strict, with all problems of a file reported at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from trainyard.errors import ConfigError
from trainyard.run_file.credentials import refuse_credentials
from trainyard.run_file.network import Network
from trainyard.run_file.queue import Queue
from trainyard_trainer.config.boosting import Boosting, require_boosting_fit
from trainyard_trainer.config.checkpoint import BoostingCheckpoint, Checkpoint
from trainyard_trainer.config.data import Data, Table
from trainyard_trainer.config.section import Section
from trainyard_trainer.config.train import require_fit, require_one_size
from trainyard_trainer.config.trainer_config import (
    BOOSTING,
    RECIPES,
    RUN_NAME_LIMIT,
    AnyTrain,
    Faults,
    RunName,
    kinds_of,
    recipe_named,
)
from trainyard_trainer.config.user_code import Command, Function, RunWith

PART = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
IMAGE = re.compile(
    rf"(?:[A-Za-z0-9.-]+(?::\d+)?/)?{PART}(?:/{PART})*"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
"""[REGISTRY[:PORT]/]NAME[:TAG][@DIGEST], as Kubernetes takes it."""


def _require_tag(image: str) -> str:
    """An image must stay what it is between two attempts: a tag (not `latest`) or a digest."""
    found = IMAGE.fullmatch(image)
    if found is None:
        raise PydanticCustomError(
            "image",
            "must be REGISTRY/NAME:TAG, with NAME in lower case, or NAME@sha256:<64 digits>",
        )
    if not found["digest"] and found["tag"] in (None, "latest"):
        raise PydanticCustomError(
            "image", "must have a tag other than latest, or a digest: NAME:TAG or NAME@sha256:..."
        )
    return image


M = TypeVar("M", bound=BaseModel)

SHOWN_LIMIT = 100
"""Characters of a wrong value that a message shows."""

Image = Annotated[str, AfterValidator(_require_tag)]


WORKER_LIMIT = 8192
"""The largest run that is planned and tested."""

Number = Annotated[int, Field(gt=0, le=WORKER_LIMIT)]


class Elastic(Section):
    """A number that may change while the run goes on, between two ends."""

    min: Number
    """The run starts with so many, and goes on while so many are there."""

    max: Number
    """It grows up to so many when the cluster has them."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Elastic:
        if self.min >= self.max:
            raise PydanticCustomError(
                "one_of", "min must be below max; for a fixed number write it alone"
            )
        return self


NUMBER, RANGE = "<number>", "<range>"
"""How pydantic tells `8` and `{min: 8, max: 16}` apart; no key of a file looks so."""

Amount = Annotated[
    Annotated[Number, Tag(NUMBER)] | Annotated[Elastic, Tag(RANGE)],
    Discriminator(lambda value: RANGE if isinstance(value, dict | Elastic) else NUMBER),
]
"""How many: a number, or `{min: 8, max: 16}` for a run that grows and shrinks with its cluster."""


class DataNodes(Section):
    """Nodes without GPUs on which the Ray loader reads and decodes, beside those that train."""

    pool: str | None = None
    """Their pool, one without GPUs; without it the platform's default for workers."""

    nodes: PositiveInt
    """How many whole nodes."""


class Resources(Section):
    """What the run asks of the cluster: exactly one of `gpus` and `workers`."""

    gpus: Amount | None = None
    """GPUs of the whole run, or `{min, max}`. One worker starts per GPU."""

    workers: Amount | None = None
    """CPU workers of the whole run, or `{min, max}`."""

    pool: str | None = None
    """The platform's pool to run on; without it the platform's default for GPUs or for workers."""

    data: DataNodes | None = None
    """Nodes for the Ray loader alone; without them it reads and decodes beside the workers."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Resources:
        if (self.gpus is None) == (self.workers is None):
            raise PydanticCustomError(
                "one_of", "must have exactly one of gpus and workers (--gpus N or --workers N)"
            )
        return self

    @property
    def unit(self) -> Literal["gpus", "workers"]:
        """What it counts."""
        return "workers" if self.gpus is None else "gpus"

    @property
    def ends(self) -> tuple[int, int]:
        """Fewest and most of them: the same number twice unless the run is elastic."""
        amount = self.workers if self.gpus is None else self.gpus
        assert amount is not None
        return (amount.min, amount.max) if isinstance(amount, Elastic) else (amount, amount)

    @property
    def is_elastic(self) -> bool:
        return self.ends[0] != self.ends[1]


class RunConfig(Section):
    """What every run file says."""

    name: RunName
    """The run's identity: its folder is `<storage>/<name>/`, and it resumes from there."""

    image: Image | None = None
    """The image of all its pods; without it the platform's."""

    resources: Resources
    """What the run asks of the cluster."""

    faults: Faults = Faults()
    """How many failures it survives."""

    queue: Queue | None = None
    """Where it waits for its place; without it, in the platform's queue if there is one."""

    network: Network | None = None
    """How its workers talk to each other; without it, as the pool says."""


class RecipeRun(RunConfig):
    """The run file of a recipe that trains a network."""

    data: Data
    """What to train on."""

    train: AnyTrain
    """A built-in recipe."""

    checkpoint: Checkpoint = Checkpoint()
    """When the run is saved."""

    @model_validator(mode="after")
    def _recipe_fits(self) -> RecipeRun:
        require_fit(self.data, self.train)
        unit = f"resources.{self.resources.unit}"
        require_one_size(self.train, unit, is_elastic=self.resources.is_elastic)
        return self

    @model_validator(mode="after")
    def _data_nodes_are_used(self) -> RecipeRun:
        if self.resources.data is None:
            return self
        if self.data.loader != "ray":
            raise PydanticCustomError(
                "one_of",
                "resources.data is for the Ray loader: set data.loader to ray, or remove it",
            )
        if self.data.ray_nodes is not None:
            raise PydanticCustomError(
                "one_of", "resources.data says where the Ray loader reads: remove data.ray_nodes"
            )
        return self


class BoostingRun(RunConfig):
    """The run file of `gradient_boosting`."""

    data: Table
    """What to train on."""

    train: Boosting
    """The trees."""

    checkpoint: BoostingCheckpoint = BoostingCheckpoint()
    """When the run is saved."""

    @model_validator(mode="after")
    def _sections_fit(self) -> BoostingRun:
        require_boosting_fit(self.data, self.train, self.checkpoint)
        resources = self.resources
        if resources.unit == "gpus":
            raise PydanticCustomError(
                "one_of",
                "resources.gpus is not for train.recipe = gradient_boosting, which the image trains on CPUs "
                "alone: use resources.workers (--workers N)",
            )
        if resources.is_elastic:
            raise PydanticCustomError(
                "one_of",
                "resources.workers must be a number for train.recipe = gradient_boosting: its workers share "
                "out the rows once, when they start",
            )
        if resources.data is not None:
            raise PydanticCustomError(
                "one_of",
                "resources.data is for the Ray loader, which train.recipe = gradient_boosting does not "
                "have: remove it",
            )
        return self


class UserCodeRun(RunConfig):
    """The run file of code of one's own."""

    code: str | None = None
    """A folder that travels with the run, and in which its code runs; its path from the run file's
    folder. What .gitignore names stays behind."""

    @model_validator(mode="after")
    def _has_one_number_of_workers(self) -> UserCodeRun:
        if self.resources.is_elastic:
            raise PydanticCustomError(
                "one_of",
                f"resources.{self.resources.unit} must be a number: {{min, max}} is for built-in recipes",
            )
        if self.resources.data is not None:
            raise PydanticCustomError(
                "one_of", "resources.data is for the Ray loader of a built-in recipe: remove it"
            )
        if "collective_timeout_s" in self.faults.model_fields_set:
            raise PydanticCustomError(
                "one_of",
                "faults.collective_timeout_s is for built-in recipes: give it to torch in your code",
            )
        return self


class CommandRun(UserCodeRun):
    """The run file of a program of one's own."""

    command: Command
    """The program and its arguments, with a Ray cluster around it. `{workers}`, `{gpus}`, `{storage}`,
    `{run}` and `{attempt}` stand for what they say; `{{run}}` is the text `{run}`."""

    run_with: RunWith | None = None
    """`torchrun`: the command is a script and its arguments, and torchrun starts it once for each worker on
    all nodes. Use it for distributed code that does not use Ray. Without this key the command is started
    once, on the head node."""


class FunctionRun(UserCodeRun):
    """The run file of a training function of one's own, which Ray Train calls on each worker."""

    function: Function
    """`module:callable`: what each worker calls, as a TorchTrainer's train_loop_per_worker."""

    train_loop_config: dict[str, Any] = Field(default_factory=dict)
    """What it is called with."""

    datasets: dict[str, str] = Field(default_factory=dict)
    """Parquet files by name, such as `{train: s3://bucket/train}`: `ray.train.get_dataset_shard(name)`
    gives a worker its part."""


class StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML whose mappings have each key once; plain YAML takes the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, (key_node, _) in zip(keys, node.value, strict=True):
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key} stands here more than once", key_node.start_mark
                )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError that names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return parse_mapping(text, str(path))


def read_documents(path: Path) -> list[Any]:
    """The documents of a YAML file, those of a Kubernetes List one by one; `-` is standard input.

    Raises ConfigError that names the file and the line.
    """
    file = Path("/dev/stdin") if path == Path("-") else path
    try:
        documents = list(yaml.load_all(file.read_text(encoding="utf-8"), Loader=StrictLoader))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML", *str(error).splitlines()) from error
    single = []
    for document in documents:
        items = document.get("items") if isinstance(document, dict) else None
        single += items if isinstance(items, list) else [document]
    return single


def parse_mapping(text: str, source: str) -> dict[str, Any]:
    """The mapping in a YAML text. Raises ConfigError that names the source and the line."""
    try:
        document = _parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML", *str(error).splitlines()) from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source} must hold a mapping, not {_kind(document)}")
    return document


def _parse(text: str) -> Any:
    """A YAML text's document. Raises YAMLError, where PyYAML raises ValueError for some values too."""
    try:
        return yaml.load(text, Loader=StrictLoader)
    except ValueError as error:  # such as the date 2001-99-99
        raise yaml.YAMLError(str(error)) from error


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


def parse_overrides(settings: Iterable[str]) -> list[tuple[list[str], Any]]:
    """`a.b=c` -> (["a", "b"], c), with c read as YAML."""
    parsed = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--set {setting} must read --set section.key=value")
        try:
            parsed.append((key.split("."), _parse(text)))
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--set {setting}: the value is not valid YAML", *str(error).splitlines()[:1]
            ) from error
    return parsed


def load_run(
    source: Path | str | Mapping[str, Any],
    settings: Sequence[str] = (),
    *,
    gpus: int | str | None = None,
    workers: int | str | None = None,
    name: str | None = None,
) -> RunConfig:
    """The run of a file, or of a mapping with the same keys, whose paths count from the current folder.

    `settings` such as `train.epochs=3`, `gpus`, `workers` (a number, or `8:16`) and `name` change it, in
    this order. Raises ConfigError with every problem: path, value, rule, and the nearest right key.
    """
    if isinstance(source, Mapping):
        document, folder, said = _as_in_a_file(source), Path.cwd(), MAPPING
    else:
        document, folder, said = read_yaml(Path(source)), Path(source).parent, str(source)
    for keys, value in parse_overrides(settings):
        _assign(document, keys, value)
    if gpus is not None and workers is not None:
        raise ConfigError("--gpus and --workers exclude each other: one worker starts per GPU")
    for resource, amount, other in (("gpus", gpus, "workers"), ("workers", workers, "gpus")):
        if amount is not None:
            _assign(document, ["resources", resource], parse_amount(str(amount)))
            document["resources"].pop(other, None)
    if name is not None:
        document["name"] = name
    # First of all: a message about another problem may show the value.
    refuse_credentials(document, said)
    run = validate(_kind_of_run(document, said), document, said)
    if isinstance(run, UserCodeRun) and run.code is not None:
        return run.model_copy(update={"code": _absolute(folder, run.code)})
    return run


def _absolute(folder: Path, code: str) -> str:
    try:
        return str((folder / code).resolve())
    except (RuntimeError, ValueError) as error:  # links in a circle, a NUL
        raise ConfigError(f"code = {_shown(code)} is no path: {error}") from None


MAPPING = "the mapping"
"""What messages call a run that comes from no file."""


def _as_in_a_file(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """What a file with the same keys holds, so that one set of rules is for both. Raises ConfigError."""
    try:
        text = yaml.safe_dump(dict(mapping))
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{MAPPING} holds what no run file can: {error.args[-1]!r}",
            "It takes str, int, float, bool, None, list and dict.",
        ) from error
    return parse_mapping(text, MAPPING)


KINDS: dict[str, type[RunConfig]] = {
    "train": RecipeRun,
    BOOSTING: BoostingRun,
    "command": CommandRun,
    "function": FunctionRun,
}
"""Of a run file, by what `kinds_of` says."""


def _kind_of_run(document: dict[str, Any], source: str) -> type[RunConfig]:
    """The model of a file; without any such key that of a recipe, which is what most are meant to be.

    Raises ConfigError for a file that says several things.
    """
    named = kinds_of(document)
    if len(named) > 1:
        keys = [key for key in ("train", "command", "function") if key in document]
        raise ConfigError(
            f"{source} has {' and '.join(keys)}: a run is one of a built-in recipe (train), of a "
            "program (command), or of a training function (function)",
            "Remove all but one.",
        )
    return KINDS[named[0]] if named else RecipeRun


def parse_amount(text: str) -> int | str | dict[str, int]:
    """`16`, or `8:16` for a range; what is neither stays as typed, and is refused with its path."""
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if found := re.fullmatch(r"(-?[0-9]{1,18}):(-?[0-9]{1,18})", text):
        return {"min": int(found[1]), "max": int(found[2])}
    return text


def load_name(path: Path) -> str:
    """The name of a file's run; what else the file says is not looked at. Raises ConfigError."""
    return check_name(read_yaml(path).get("name"), f"{path}: name")


def check_name(name: object, what: str) -> str:
    """The name of a run, if it is one. Raises ConfigError."""
    try:
        return TypeAdapter(RunName).validate_python(name)
    except ValidationError as error:
        raise ConfigError(f"{what} = {_shown(name)}: {_name_rule(name)}") from error


def _assign(document: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    section: Any = document
    for depth, key in enumerate(keys[:-1], start=1):
        if section.get(key) is None:  # absent, or `key:` with nothing behind it
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise ConfigError(
                f"{'.'.join(keys)} cannot be set: {'.'.join(keys[:depth])} is a value"
            )
    section[keys[-1]] = value


def validate(model: type[M], document: dict[str, Any], source: str) -> M:
    """The document as a model. Raises ConfigError with all its problems at once."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        problems = [_problem(model, detail) for detail in error.errors()]
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{source} has {count}", *problems) from error


def _problem(model: type[BaseModel], detail: ErrorDetails) -> str:
    """One line: path = value, the rule, and the nearest right key where one is near."""
    location, sections = _follow(model, detail["loc"])
    path = ".".join(location)
    value = _shown(detail["input"])
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        known = sorted({field for section in sections for field in _keys(section)})
        near = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return f"{path}: unknown key; {hint}"
    if detail["type"] == "missing":
        return f"{path}: is required"
    if detail["loc"] == ("name",):
        return f"name = {value}: {_name_rule(detail['input'])}"
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{path} = {value}: must be a mapping"
    if detail["type"] == "one_of":
        return f"{path}: {detail['msg']}" if path else detail["msg"]
    if detail["type"] == "union_tag_not_found":
        return f"{path}.name: is required"
    if detail["type"] == "union_tag_invalid":
        context = detail["ctx"]
        if context["discriminator"] != "'name'":
            recipes = ", ".join(map(repr, RECIPES))
            return f"{path}.recipe = {context['tag']!r}: must be one of {recipes}"
        return f"{path}.name = {context['tag']!r}: must be one of {context['expected_tags']}"
    rule = detail["msg"].replace("Input should be", "must be")
    return f"{path} = {value}: {rule[0].lower()}{rule[1:]}"


def _name_rule(name: object) -> str:
    length = f" ({len(name)} characters)" if isinstance(name, str) else ""
    return (
        f"must be at most {RUN_NAME_LIMIT} characters, lower case letters, digits and dashes, "
        f"beginning with a letter and not ending with a dash{length}"
    )


def _shown(value: object) -> str:
    """A value for a message, in one line and not too long."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= SHOWN_LIMIT else f"{text[:SHOWN_LIMIT]}..."


def _keys(section: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _follow(
    model: type[BaseModel], location: Sequence[int | str]
) -> tuple[list[str], list[type[BaseModel]]]:
    """The path as the user wrote it, without the tags of unions, and the models at its end's parent."""
    path: list[str] = []
    here: list[type[BaseModel]] = [model]
    parents = here
    for step in location:
        tagged = [member for member in here if _tag(member) == step]
        if tagged:
            parents = here = tagged
            continue
        if step in (NUMBER, RANGE):
            continue
        path.append(str(step))
        parents = here
        here = [
            inner
            for section in here
            for name, field in section.model_fields.items()
            if step in (name, field.alias)
            for inner in _models(field.annotation)
        ] or ([*here] if isinstance(step, int) else [])
    return path, parents


def section_of(annotation: Any, value: Any) -> type[BaseModel] | None:
    """The model of a field, of several that of the recipe in its value; None for a field of another kind."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    named = recipe_named(value)
    return next((model for model in _models(annotation) if _tag(model) == named), None)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple, list, dict):
        return [found for part in get_args(annotation) for found in _models(part)]
    return []


def _tag(model: type[BaseModel]) -> str | None:
    """The value of a model's `name` or `recipe: Literal[...]`, by which pydantic tells a union apart."""
    field = model.model_fields.get("recipe") or model.model_fields.get("name")
    if field is None or get_origin(field.annotation) is not Literal:
        return None
    tag = get_args(field.annotation)[0]
    return tag if isinstance(tag, str) else None
