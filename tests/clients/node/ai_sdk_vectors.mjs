// Vercel's AI SDK: node ai_sdk_vectors.mjs BASE_URL MODEL EMBEDDING_MODEL
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { cosineSimilarity, embed, embedMany, generateText, streamText } from "ai";

const [baseURL, modelName, embeddingModel] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "tidemill", baseURL, includeUsage: true });

const model = provider.embeddingModel(embeddingModel);
const values = ["a cat", "a kitten", "the stock market"];
const { embeddings, usage } = await embedMany({ model, values });
const [cat, kitten, stocks] = embeddings;
assert.equal(cat.length, 384);
assert.ok(cosineSimilarity(cat, kitten) > 0.5 && cosineSimilarity(cat, stocks) < 0.2);
assert.ok(usage.tokens > 0);
const { embedding } = await embed({ model, value: values[0] });
assert.ok(cosineSimilarity(embedding, cat) > 0.9999);

const asked = { model: provider.completionModel(modelName), temperature: 0, maxOutputTokens: 6 };
const prompt = "The capital of France is";
const whole = await generateText({ ...asked, prompt });
assert.equal(whole.usage.outputTokens, 6);
const stream = streamText({ ...asked, prompt });
let text = "";
for await (const part of stream.textStream) text += part;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, 6);

const versionOf = (name) =>
  JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version;
const client = "@ai-sdk/openai-compatible";
const version = `${versionOf(client)} (ai ${versionOf("ai")})`;
console.log(JSON.stringify({ client, version, ran: ["embeddings", "completion model"] }));
