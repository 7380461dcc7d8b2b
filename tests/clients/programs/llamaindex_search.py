"""LlamaIndex over documents: embeddings, an index of them, and questions answered from it.

python llamaindex_search.py BASE_URL MODEL EMBEDDING_MODEL
"""

import asyncio
import json
import math
import sys
from importlib.metadata import version

from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

BASE_URL, MODEL, EMBEDDING_MODEL = sys.argv[1:4]
SERVER = {"api_base": BASE_URL, "api_key": "none"}
FACTS = [
    "The mill at Oakham grinds wheat and was built in 1795.",
    "Kittens are playful young cats.",
    "Shares fell on the stock market today.",
]
QUESTION = "When was the mill built?"


def main() -> None:
    Settings.embed_model = OpenAILikeEmbedding(model_name=EMBEDDING_MODEL, **SERVER)
    Settings.llm = OpenAILike(
        model=MODEL, is_chat_model=True, temperature=0, max_tokens=32, **SERVER
    )
    vectors_are_alike_where_texts_are()
    questions_are_answered_from_documents()
    ran = ["embeddings", "index", "query engine", "streamed query", "chat engine"]
    name = "llama-index-llms-openai-like"
    versions = f"{version(name)} (core {version('llama-index-core')})"
    print(json.dumps({"client": name, "version": versions, "ran": ran}))


def vectors_are_alike_where_texts_are() -> None:
    texts = ["a cat", "a kitten", "the stock market"]
    cat, kitten, stocks = Settings.embed_model.get_text_embedding_batch(texts)
    assert len(cat) == 384 and math.isclose(math.hypot(*cat), 1, rel_tol=1e-4), cat[:4]
    assert math.dist(cat, kitten) < 1 < math.dist(cat, stocks)
    again = asyncio.run(Settings.embed_model.aget_query_embedding("a cat"))
    assert math.dist(again, cat) < 1e-4


def questions_are_answered_from_documents() -> None:
    index = VectorStoreIndex.from_documents([Document(text=fact) for fact in FACTS])
    answer = index.as_query_engine(similarity_top_k=1).query(QUESTION)
    assert [node.text for node in answer.source_nodes] == [FACTS[0]], answer
    assert "1795" in str(answer), answer
    stream = index.as_query_engine(similarity_top_k=1, streaming=True).query(QUESTION)
    assert "".join(stream.response_gen) == str(answer), answer
    chat = index.as_chat_engine(chat_mode="context", similarity_top_k=1)
    assert chat.chat(QUESTION).response and len(chat.chat_history) == 2


if __name__ == "__main__":
    main()
