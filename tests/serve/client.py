"""The official client against a server with the models demo and a: BASE_URL KEY."""

import asyncio
import sys

import openai

url, key = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120)
names = [model.id for model in client.models.list()]
assert names == ["demo", "a"], names
assert client.models.retrieve("a").id == "a"

messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "List files"}]
chat = dict(model="a", messages=messages, temperature=0, max_completion_tokens=8)
whole = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
choice = whole.choices[0]
assert choice.finish_reason in ("stop", "length") and choice.message.role == "assistant", whole
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens, whole
scores = choice.logprobs.content
assert len(scores) == whole.usage.completion_tokens, whole
assert all(len(s.top_logprobs) == 2 and s.logprob == s.top_logprobs[0].logprob for s in scores), whole

parts, last, finish = [], None, None
for event in client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}):
    last = event
    for c in event.choices:
        parts.append(c.delta.content or "")
        finish = c.finish_reason or finish
assert "".join(parts) == choice.message.content and finish == choice.finish_reason, parts
assert last.usage == whole.usage, last

text = dict(model="demo", prompt="git ch", temperature=0, max_tokens=6)
made = client.completions.create(**text, echo=True, logprobs=2)
assert made.choices[0].text.startswith("git ch"), made
lengths = {len(v) for v in (made.choices[0].logprobs.tokens, made.choices[0].logprobs.token_logprobs)}
assert lengths == {made.usage.total_tokens}, made
streamed = "".join(e.choices[0].text for e in client.completions.create(**text, stream=True))
assert "git ch" + streamed == made.choices[0].text, streamed


async def several():
    many = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=120)
    return await asyncio.gather(*[many.completions.create(**text) for _ in range(6)])


assert {answer.choices[0].text for answer in asyncio.run(several())} == {streamed}


def refused(error, call):
    try:
        call()
    except error as e:
        return e
    raise AssertionError(f"not refused with {error}")


refused(openai.NotFoundError, lambda: client.completions.create(model="b", prompt="x"))
wrong = refused(openai.BadRequestError, lambda: client.chat.completions.create(**chat, n=2))
assert wrong.param == "n", wrong
stranger = openai.OpenAI(base_url=url, api_key="other", max_retries=0)
refused(openai.AuthenticationError, lambda: stranger.models.list())
print("done")
