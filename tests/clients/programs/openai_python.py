"""OpenAI's client for Python: python openai_python.py BASE_URL MODEL"""

import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
answer = client.chat.completions.create(
    model=sys.argv[2],
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    max_tokens=16,
)
assert "Paris" in (answer.choices[0].message.content or "")
print(json.dumps({"client": "openai", "version": openai.__version__, "ran": ["chat"]}))
