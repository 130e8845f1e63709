"""Token ids to text as they come: whole characters only, and nothing beyond a stop string.

Knows the tokenizer's `decode` and nothing of its kind: byte-level and SentencePiece vocabularies
differ in what a token's text depends on, and both only look a few tokens back.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualpace.core.sampling import SamplingParams
from dualpace.server.tokenizer import Tokenizer

TORN = "\N{REPLACEMENT CHARACTER}"  # what `decode` shows in place of an incomplete character
PRIMING_TOKENS = 6  # of the prompt: enough to tell whether a leading space belongs to the text
CHARACTER_BYTES = 4  # of the longest UTF-8 character, so also the most tokens that one can span


class IncrementalDecoder:
    """Decodes a short window of ids that slides along, and gives what each new id adds to it."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt[-PRIMING_TOKENS:])
        self._text = self._decode()
        for _ in range(CHARACTER_BYTES - 1):
            if not self._text.startswith(TORN):
                break
            # The window cuts into a character, which with byte fallback spoils all that follow it.
            del self._window[:1]
            self._text = self._decode()
        self._settled = len(self._window)  # ids of the window whose text is out
        self._shown = len(self._text)  # characters of the window's text that are out

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes, often empty."""
        before = self._text
        self._window.append(token_id)
        self._text = text = self._decode()
        torn = text.endswith(TORN)
        if text == before and not torn:
            self._window.pop()  # a skipped special token: it would only widen the window
            return ""
        if torn and len(self._window) - self._settled < CHARACTER_BYTES:
            return ""
        # Still torn after so many tokens: either a character has been completed and another one
        # begun, or these bytes never will be one. All but the last character is final.
        fresh = text[self._shown : len(text) - torn]
        del self._window[: self._settled]
        self._settled = len(self._window)
        self._text = self._decode()
        self._shown = len(self._text) - torn
        return fresh

    def flush(self) -> str:
        """Text held back at the end, without the half character it may end in."""
        return self._text[self._shown :].rstrip(TORN)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)


class StopStrings:
    """Passes text on up to a stop string; holds back what could be the beginning of one."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self.found: str | None = None
        self._stops = tuple(stops)
        self._include = include
        self._reach = max((len(stop) for stop in stops), default=1) - 1
        self._recent = ""
        self._shown = 0  # characters of `_recent` that are out

    def push(self, text: str, armed: bool = True) -> str:
        """Text that may be shown now. While not `armed`, a stop string that ends here is text."""
        if not self._stops:
            return text
        old = len(self._recent)
        self._recent += text
        hit = self._first_hit(old) if armed else None
        if hit is not None:
            end, start, self.found = hit
            cut = end if self._include else start
            return self._recent[self._shown : cut]
        keep = self._hold_from()
        ready = self._recent[self._shown : keep]
        dropped = max(0, len(self._recent) - self._reach)
        self._recent = self._recent[dropped:]
        self._shown = keep - dropped
        return ready

    def flush(self) -> str:
        """Text held back that turned out not to become a stop string."""
        return self._recent[self._shown :]

    def _first_hit(self, old: int) -> tuple[int, int, str] | None:
        """(end, start, stop) of the stop string that is complete first, among those new."""
        hits = []
        for stop in self._stops:
            start = self._recent.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                hits.append((start + len(stop), start, stop))
        return min(hits, default=None)

    def _hold_from(self) -> int:
        size = len(self._recent)
        if self._include:
            return size
        for start in range(max(self._shown, size - self._reach), size):
            rest = self._recent[start:]
            if any(stop.startswith(rest) for stop in self._stops):
                return start
        return size


class OutputText:
    """The text of one choice: tokens in, text for the client out.

    `stopped` turns true when a stop string has been found; what comes later is not text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
        self._decoder = IncrementalDecoder(tokenizer, prompt, params.skip_special_tokens)
        self._stops = StopStrings(stops, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._count = 0

    @property
    def stopped(self) -> bool:
        return self._stops.found is not None

    def push(self, token_id: int) -> str:
        """Text to show after one more token (not for a stop token, which has none)."""
        self._count += 1
        return self._stops.push(self._decoder.push(token_id), self._count > self._min_tokens)

    def finish(self) -> str:
        """The rest, when the engine has ended the request."""
        rest = self._stops.push(self._decoder.flush(), self._count > self._min_tokens)
        return rest if self.stopped else rest + self._stops.flush()
