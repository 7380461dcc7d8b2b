"""LangChain with vectors and agents: a small search, and an agent that uses it as its tool.

python langchain_agents.py BASE_URL MODEL EMBEDDING_MODEL
"""

import asyncio
import json
import math
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

BASE_URL, MODEL, EMBEDDING_MODEL = sys.argv[1:4]
SERVER = {"base_url": BASE_URL, "api_key": "none"}
FACTS = [
    "Cats sleep for most of the day.",
    "Kittens are playful young cats.",
    "Shares fell on the stock market today.",
]
llm = ChatOpenAI(model=MODEL, temperature=0, max_tokens=60, **SERVER)
# Without the last option token ids of another model's tokenizer would be sent.
embeddings = OpenAIEmbeddings(model=EMBEDDING_MODEL, check_embedding_ctx_length=False, **SERVER)
store = InMemoryVectorStore(embeddings)


class Mood(BaseModel):
    """Any object that follows the schema is valid."""

    mood: Literal["good", "bad"]


@tool
def search(topic: Literal["money", "animals"]) -> str:
    """Tell what is known of a topic."""
    return store.similarity_search(topic, k=1)[0].page_content


@wrap_model_call
def search_first(
    request: ModelRequest[None], handler: Callable[[ModelRequest[None]], ModelResponse]
) -> ModelResponse:
    """What a weak model would not do by itself."""
    has_searched = any(isinstance(each, ToolMessage) for each in request.messages)
    return handler(request.override(tool_choice="none" if has_searched else "search"))


def main() -> None:
    vectors_are_alike_where_texts_are()
    what_is_near_is_found()
    an_agent_searches()
    an_agent_fills_a_schema()
    ran = ["embeddings", "vector store", "agent", "agent stream", "agent structured output"]
    name = "langchain-openai"
    versions = f"{version(name)} (langchain {version('langchain')})"
    print(json.dumps({"client": name, "version": versions, "ran": ran}))


def vectors_are_alike_where_texts_are() -> None:
    cat, kitten, stocks = embeddings.embed_documents(["a cat", "a kitten", "the stock market"])
    assert len(cat) == 384 and math.isclose(math.hypot(*cat), 1, rel_tol=1e-4), cat[:4]
    assert math.dist(cat, kitten) < 1 < math.dist(cat, stocks)
    assert math.dist(asyncio.run(embeddings.aembed_query("a cat")), cat) < 1e-4


def what_is_near_is_found() -> None:
    store.add_texts(FACTS)
    [(found, score), *_] = store.similarity_search_with_score("finance", k=2)
    assert found.page_content == FACTS[2] and 0 < score < 1, (found, score)


def an_agent_searches() -> None:
    agent = create_agent(llm, [search], middleware=[search_first])
    asked = {"messages": [{"role": "user", "content": "What do you know of animals?"}]}
    _, call, told, last = agent.invoke(asked)["messages"]
    assert isinstance(call, AIMessage) and call.tool_calls[0]["name"] == "search", call
    assert isinstance(told, ToolMessage) and told.content in FACTS, told
    assert isinstance(last, AIMessage) and last.text, last
    chunks = [chunk for chunk, _ in agent.stream(asked, stream_mode="messages")]
    spoken = "".join(chunk.text for chunk in chunks if not isinstance(chunk, ToolMessage))
    assert spoken == last.text, (spoken, last.text)


def an_agent_fills_a_schema() -> None:
    agent = create_agent(llm, response_format=ProviderStrategy(Mood))
    answer = agent.invoke({"messages": [{"role": "user", "content": "What a day!"}]})
    assert isinstance(answer["structured_response"], Mood), answer


if __name__ == "__main__":
    main()
