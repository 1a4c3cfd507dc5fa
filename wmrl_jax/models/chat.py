"""Chat templates: from messages to the text that a published model was tuned on, and its ids.

A conversation of several turns is built from token ids: what the agent wrote stays as it was
sampled, and `between_turns` gives what comes between its turn and the next.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wmrl_jax.errors import UserError

Message = Mapping[str, Any]
"""`role` ("system", "user" or "assistant") and `content`."""


@dataclass(frozen=True)
class Chat:
    """A model's chat template.

    Attributes:
      template: Jinja2 source.
      encode_special: text -> ids, in which the names of special tokens become these tokens.
      variables: what the template may read beside the messages, bos_token for instance.
    """

    template: str
    encode_special: Callable[[str], list[int]]
    variables: Mapping[str, Any]

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(self.template)
        except jinja2.TemplateError as error:
            raise UserError(f"the model's chat template cannot be read: {error}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation.

        Args:
          messages: in their order.
          add_generation_prompt: whether the beginning of the assistant's turn follows.

        Raises:
          UserError: the template refuses the messages.
        """
        try:
            return self._compiled.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except jinja2.TemplateError as error:
            raise UserError(f"the model's chat template refuses: {error}") from error

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's turn begins."""
        return self.encode_special(self.render(messages, add_generation_prompt=True))

    def between_turns(self, message: Message) -> list[int]:
        """Ids from behind the assistant's last word to the beginning of its next turn.

        Args:
          message: what is said to it in between.

        Raises:
          UserError: the template writes earlier turns in another way once there is a later one.
        """
        mark = "\N{SNOWMAN}"
        while mark in str(message["content"]):
            mark += "\N{SNOWMAN}"
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        text = self.render([*asked, message], add_generation_prompt=True)
        if text.count(mark) != 1:
            raise UserError("the model's chat template does not keep the assistant's turns as text")
        return self.encode_special(text.split(mark)[1])


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote; its text is rendered as it stands."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja2's own filter escapes <, > and &.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
