"""The configuration section of one judge: `reward.judges.<name>`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from models.recipes.media_recipes import VideoSampling
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.classifier_labels import read_labels
from yatt_mm.config.values import Count, Seconds, Section, Size
from yatt_mm.config.wanted import WEB_ADDRESS
from yatt_mm.protocol.genrm import JudgeSpec, RemoteSpec
from yatt_mm.protocol.judge_template import CONVERSATION, DEFAULT, JudgeTemplate
from yatt_mm.protocol.verdicts import JsonScore, LabelScore, RegexScore, Verdict, YesNo


def _check_quoted(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("YAML takes yes and no without quotes for true and false; write 'yes' and 'no' with quotes")
    return value


Word = Annotated[str, BeforeValidator(_check_quoted)]
Score = Annotated[float, Field(allow_inf_nan=False)]

READ_BY = {"pattern": ("regex",), "field": ("json",), "scale": ("regex", "json")}
"""[key] the kinds of verdicts that read it."""
SHARE_OF_CALL = 0.8
"""The share of `controllers.deadline_s` after which a judge, with all its attempts, has failed; the run continues."""
OF_SERVERS = ("api_key_env", "deadline_s", "max_outage_s")
"""The keys that only a judge with a `url` reads."""
OF_SPEECH = ("yes_words", "no_words", "pattern", "field", "scale", "max_tokens", "temperature", "num_votes", "url")
"""The keys that have no meaning for a judge that classifies, because it samples no text."""


class JudgeSection(Section):
    model: str
    """Its Hugging Face folder; with `url`, its name at the server."""
    url: Annotated[str, Field(pattern=WEB_ADDRESS)] | None = None
    """An OpenAI-compatible server (`http://host:8000/v1`) that judges, instead of engines of the run."""
    api_key_env: str | None = None
    """The environment variable of the launcher that holds the key for `url` (`Authorization: Bearer ...`)."""
    deadline_s: Seconds = 60.0
    """The longest time that one request to `url` may take."""
    max_outage_s: Seconds | None = None
    """The longest time that a verdict is waited for while the server of `url` is away: takes no connection, breaks it
    off, gives no reply, or replies with a status of 500 or more, 408, 425 or 429. At most 0.8 of
    `controllers.deadline_s`, which is the default."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """The weight of its score in the reward."""
    template: str | None = None
    """The text for the judge, after the media; `{question}`, `{response}`, `{answer}` and `{fields[name]}` are filled
    in. By default it holds question and answer, and asks whether the response is right. For a `classifier` it is the
    user's turn, by default `{question}`; the response follows as the assistant's turn, unless the template names it."""
    verdict: Literal["yes_no", "regex", "json", "classifier"] = "yes_no"
    """How the score is read: the probability of yes against no as the first token, a number that `pattern` captures,
    the `field` of a JSON object, or the logit that the head of a sequence classifier (a discriminative reward model)
    gives the conversation at its last token."""
    label: str | int | None = None
    """The `classifier`'s label that is the score, by name or number. Needed where it has several."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """The function of the `classifier`'s logits: none (Bradley-Terry reward models), or a probability."""
    yes_words: tuple[Word, ...] = YesNo().yes
    """Texts of one token that mean yes."""
    no_words: tuple[Word, ...] = YesNo().no
    """Texts of one token that mean no."""
    pattern: str = r"(-?\d+(?:\.\d+)?)"
    """A regular expression with one group around the number; its last match counts."""
    field: str = "score"
    """The field of the JSON object; the last object in the text counts."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """The best number that the judge can give; it becomes 1."""
    max_tokens: Count = 256
    """The most tokens of the judge's text; `yes_no` takes one token."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """The sampling temperature, up to 2 as in vLLM; 0 takes the most likely token."""
    num_votes: Count = 1
    """Verdicts per response; their mean counts."""
    max_attempts: Count = 2
    """How many times a verdict is asked for that cannot be read or does not come in time. Requests that fail because
    the server of `url` is away do not count."""
    threshold: Score | None = None
    """Scores from here on count as 1, others as 0; without it the score itself counts. In 0..1 unless scores are
    logits."""
    score_on_failure: Score = 0.0
    """The score of a response without a verdict; it is counted in `genrm/num_failed`, and `reward.max_failed_frac`
    limits how many there may be. In 0..1 unless scores are logits."""
    num_engines: Count = 1
    """The number of vLLM engines of this judge; no two engines of judges share a device. In partial colocation there
    are as many as the devices hold. With `url`, the number of actors that send requests."""
    tp: Count = 1
    """The devices of each engine, over which its tensors are cut."""
    max_model_len: Count = 4096
    """The longest prompt and response together, in tokens, images expanded."""
    max_num_seqs: Count = 256
    """The sequences that an engine works on at the same time; with `url`, the requests at the same time."""
    max_groups_per_engine: Count | None = None
    """The groups that an engine gets at once; by default as many as `max_num_seqs` holds."""
    kv_cache_memory: Size = 2**30
    """The memory of each engine's key-value cache, on each of its devices."""


def judge_spec(name: str, section: JudgeSection, video: VideoSampling) -> JudgeSpec:
    """Return what a judge's engines need to know: the template, the verdict's form, the sampling.

    Raises: ConfigError: a template or a pattern cannot be used, or a classifier's folder does not have the head that
    the section wants.
    """
    try:
        return JudgeSpec(
            name=name,
            template=_template(section),
            verdict=_verdict(section),
            max_tokens=section.max_tokens,
            temperature=section.temperature,
            num_votes=section.num_votes,
            max_attempts=section.max_attempts,
            threshold=section.threshold,
            score_on_failure=section.score_on_failure,
            video=video,
        )
    except ValueError as error:
        raise ConfigError(f"reward.judges.{name}: {error}") from error


def remote_spec(
    name: str, section: JudgeSection, *, controllers_deadline_s: float, api_key_file: Path | None = None
) -> RemoteSpec | None:
    """Return the server that judges; None where engines of the run do. `api_key_file`: the file with the server's key;
    without one, the key must be in the environment.

    Raises: ConfigError: the url or the key cannot be used, the judge has no url but a key that needs one, or it waits
    longer than controllers do.
    """
    if section.url is None:
        for key in OF_SERVERS:
            if (value := getattr(section, key)) != JudgeSection.model_fields[key].default:
                raise ConfigError(f"reward.judges.{name}.{key} is {value}, but it has no url; leave it out")
        return None
    _check_url(name, section.url)
    if api_key_file is None:
        api_key_of(name, section)
    longest_s = SHARE_OF_CALL * controllers_deadline_s
    if (section.max_outage_s or 0.0) > longest_s:
        raise ConfigError(
            f"reward.judges.{name}.max_outage_s is {section.max_outage_s:g}, but controllers wait for a call of "
            f"controllers.deadline_s ({controllers_deadline_s:g} s) at most, and {SHARE_OF_CALL:g} of that is "
            f"{longest_s:g} s; lower max_outage_s or raise controllers.deadline_s"
        )
    return RemoteSpec(
        url=section.url,
        api_key_env=section.api_key_env,
        api_key_file=None if api_key_file is None else str(api_key_file),
        model=section.model,
        deadline_s=section.deadline_s,
        max_outage_s=section.max_outage_s or longest_s,
        max_requests=section.max_num_seqs,
        call_timeout_s=longest_s,
    )


def api_key_of(name: str, section: JudgeSection) -> str | None:
    """Return the key of a judge's server, from the environment of this process; None if it needs none.

    Raises: ConfigError: the environment variable is not set, or no header can hold its value.
    """
    variable = section.api_key_env
    if variable is None:
        return None
    api_key = os.environ.get(variable, "").strip()
    if not (api_key and api_key.isprintable()):
        found = "not set in the environment" if not api_key else "set to what cannot stand in a header"
        raise ConfigError(f"reward.judges.{name}.api_key_env is {variable}, which is {found}; export the key in it")
    return api_key


def num_labels(section: JudgeSection) -> int | None:
    """Return the number of labels of a judge that classifies; None for one that samples text. Raises ValueError like
    `read_labels`."""
    return len(read_labels(Path(section.model))) if section.verdict == "classifier" else None


def _template(section: JudgeSection) -> JudgeTemplate:
    if section.verdict == "classifier":
        return JudgeTemplate(CONVERSATION if section.template is None else section.template, needs_response=False)
    return JudgeTemplate(DEFAULT if section.template is None else section.template)


def _verdict(section: JudgeSection) -> Verdict:
    if section.verdict == "classifier":
        return _label_score(section)
    _check_unset(
        section, ("label", "activation"), f"only verdict classifier reads it, and verdict is {section.verdict}"
    )
    for key, readers in READ_BY.items():
        if section.verdict not in readers:
            wanted = " or ".join(readers)
            _check_unset(section, (key,), f"it is read with verdict {wanted}, and verdict is {section.verdict}")
    if section.verdict == "yes_no":
        return YesNo(yes=section.yes_words, no=section.no_words)
    if section.verdict == "regex":
        return RegexScore(pattern=section.pattern, scale=section.scale)
    return JsonScore(field=section.field, scale=section.scale)


def _label_score(section: JudgeSection) -> LabelScore:
    _check_unset(section, OF_SPEECH, "verdict classifier has no use for it: nothing is sampled, and no server asked")
    labels = read_labels(Path(section.model))
    if section.activation == "softmax" and len(labels) == 1:
        raise ValueError(
            "activation is softmax, which is always 1 over the single label of this classifier; set sigmoid or none"
        )
    return LabelScore(label=_row(labels, section.label), activation=section.activation)


def _row(labels: tuple[str, ...], label: str | int | None) -> int:
    if label is None and len(labels) == 1:
        return 0
    if isinstance(label, str) and label in labels:
        return labels.index(label)
    if isinstance(label, int) and 0 <= label < len(labels):
        return label
    found = "not set" if label is None else repr(label)
    raise ValueError(
        f"label is {found}; the classifier's labels are {', '.join(labels)}: name the one that is the score"
    )


def _check_url(name: str, url: str) -> None:
    """Check what is in the address of a server. A message does not repeat a password in it."""
    try:
        address = urlsplit(url)
        found = None if address.hostname and address.port != 0 else "names no host"
    except ValueError:
        address, found = urlsplit(""), "has a host or a port that is none"
    if "@" in address.netloc:
        found = "has a name or a password before the host, which would stand in the files of the run; name the "
        found += f"environment variable of a key in reward.judges.{name}.api_key_env"
    elif address.query or address.fragment:
        found = "has a query or a fragment, and paths are put behind it"
    if found is not None:
        raise ConfigError(
            f"the address in reward.judges.{name}.url {found}; give it up to and including the version, such as "
            "http://host:8000/v1"
        )


def _check_unset(section: JudgeSection, keys: Sequence[str], why: str) -> None:
    for key in keys:
        value = getattr(section, key)
        if value != JudgeSection.model_fields[key].default:
            raise ValueError(f"{key} is {value!r}, but {why}; leave it out")
