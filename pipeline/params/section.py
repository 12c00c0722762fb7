"""What every section of params.yaml shares: strictness, ranges, and errors that name key, value, rule and remedy."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.errors import ParameterError

PARAMS_FILE = "params.yaml"


class Section(BaseModel):
    """One section of params.yaml: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


S = TypeVar("S", bound=Section)


def param(description: str, example: Any, *, usual: tuple[float, float] | None = None, why: str = "", **limits) -> Any:
    """A required parameter. `limits` are hard (pydantic's ge, gt, le, lt); `usual` is a range outside which we warn.

    Args:
        description: one sentence; the parameter's documentation.
        example: a value that works, offered when the key is missing.
        usual: the field's recommended range, both ends included.
        why: the reason for `usual`, shown with the warning.
    """
    return Field(description=description, examples=[example], json_schema_extra={"usual": usual, "why": why}, **limits)


def refuse_without_revision(spec: str | None) -> str | None:
    """A validator of keys that may name a model on the hub.

    Raises:
        ValueError: it does, and not at which revision.
    """
    if spec is not None and spec.startswith("hf://") and (spec.count("@") != 1 or spec.endswith("@")):
        raise ValueError(f"is {spec!r} but a hub model must name its revision; write hf://org/name@revision.")
    return spec


def read_params(path: str | Path = PARAMS_FILE) -> dict[str, Any]:
    """The whole file as plain dicts. YAML 1.2, so that 1e-5 is a number here as it is in DVC.

    Raises:
        ParameterError: the file is missing, is not YAML, or is not a mapping of sections.
    """
    path = Path(path)
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParameterError(
            f"{path} does not exist; run from the project's root, or copy a file from recipes/ to it."
        ) from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ParameterError(
            f"{path} must be a mapping of sections, but is a {type(content).__name__}; see recipes/demo.yaml."
        )
    return content


def load_section(name: str, kind: type[S], path: str | Path = PARAMS_FILE) -> S:
    """Section `name` of the parameter file, checked.

    Raises:
        ParameterError: all faults of the section, one sentence each.
    """
    content = read_params(path)
    if name not in content:
        raise ParameterError(f"{path} has no section {name}; copy it from recipes/demo.yaml.")
    return parse_section(name, kind, content[name])


def parse_seed(content: dict[str, Any]) -> int:
    """The top-level seed.

    Raises:
        ParameterError: it is missing or no whole number that generators take.
    """
    seed = content.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**31:
        raise ParameterError(f"seed is {seed!r} but must be a whole number from 0 to 2147483647; for example 17.")
    return seed


def parse_section(name: str, kind: type[S], content: Any) -> S:
    """`content` as a `kind`.

    Raises:
        ParameterError: all faults of the section, one sentence each.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ParameterError(" ".join(_sentence(name, kind, fault) for fault in error.errors())) from None


def unusual_values(name: str, section: Section) -> list[str]:
    """One sentence for each value outside the range that the field recommends, with the reason."""
    sentences = []
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, Section):
            sentences += unusual_values(f"{name}.{key}", value)
            continue
        extra = field.json_schema_extra or {}
        usual = extra.get("usual")
        if usual and value is not None and not usual[0] <= value <= usual[1]:
            sentences.append(
                f"{name}.{key} is {value:g}, outside the usual {usual[0]:g} to {usual[1]:g}: {extra['why']}."
            )
    return sentences


def _sentence(name: str, kind: type[Section], fault: dict) -> str:
    key, owner, field = _place(name, kind, fault["loc"])
    example = f"; for example {field.examples[0]!r}" if field is not None and field.examples else ""
    if fault["type"] == "extra_forbidden":
        parent, _, last = key.rpartition(".")
        return f"{key} is not a parameter; {_near(last, keys_of(owner), parent + '.') or _known(keys_of(owner))}"
    if fault["type"] == "missing":
        return f"{key} is missing{example}."
    if fault["type"] == "union_tag_not_found":
        return f"{key}.{_discriminator(fault)} is missing; {_known(_tagged(field))}"
    if fault["type"] == "union_tag_invalid":
        tag, tags = fault["ctx"]["tag"], _tagged(field)
        return f"{key}.{_discriminator(fault)} is {tag!r} but there is no such kind; {_near(tag, tags) or _known(tags)}"
    if fault["type"] == "value_error":  # raised by a validator of ours, which says it all
        message = str(fault["ctx"]["error"])
        return message if not fault["loc"] else f"{key} {message}"
    rule = fault["msg"].replace("Input should be", "must be").replace("a valid ", "a ")
    rule = rule.replace("dictionary or object to extract fields from", "mapping")
    return f"{key} is {fault['input']!r} but {rule}{example}."


def keys_of(section: type[Section]) -> dict[str, FieldInfo]:
    """The fields by the names that they have in params.yaml; a key that is a word of Python's has another name in code."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _near(word: str, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {prefix}{near[0]}?" if near else ""


def _known(names: Iterable[str]) -> str:
    return f"known here: {', '.join(names)}."


def _discriminator(fault: dict) -> str:
    return fault["ctx"]["discriminator"].strip("'")


def _place(name: str, kind: type[Section], loc: tuple) -> tuple[str, type[Section], FieldInfo | None]:
    """The written-out key at `loc`, the section class that owns it, and its field if there is one."""
    key, owner, field = name, kind, None
    for part in loc:
        if isinstance(part, int):
            key += f"[{part}]"
        elif field is not None and key.endswith("]"):  # which of the sections that may stand here: no part of the key
            owner, field = _tagged(field)[part], None
        else:
            key += f".{part}"
            field = keys_of(owner).get(part)
            inner = field.annotation if field is not None else None
            if isinstance(inner, type) and issubclass(inner, Section):
                owner, field = inner, None
    return key, owner, field


def _tagged(field: FieldInfo) -> dict[str, type[Section]]:
    """The sections that a list may hold, told apart by a tag: the fields with a discriminator of pydantic."""
    ((union, discriminated),) = map(get_args, get_args(field.annotation))
    return {
        get_args(section.model_fields[discriminated.discriminator].annotation)[0]: section
        for section in get_args(union)
    }
