// OpenAI's client for Node: node openai_vectors.mjs BASE_URL MODEL EMBEDDING_MODEL [SPEECH_MODEL CLIP]
import assert from "node:assert/strict";
import { createReadStream, readFileSync } from "node:fs";
import OpenAI from "openai";

const [baseURL, , model, speechModel, clip] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none" });
const ran = ["embeddings"];
const product = (one, other) => one.reduce((sum, value, at) => sum + value * other[at], 0);

// Asks for base64 by itself, and decodes it.
const { data } = await client.embeddings.create({
  model,
  input: ["a cat", "a kitten", "the stock market"],
});
const [cat, kitten, stocks] = data.map((each) => each.embedding);
assert.equal(cat.length, 384);
assert.ok(product(cat, kitten) > 0.5 && product(cat, stocks) < 0.2);
const floats = await client.embeddings.create({ model, input: "a cat", encoding_format: "float" });
assert.ok(Math.abs(product(floats.data[0].embedding, cat) - 1) < 1e-4);
const short = await client.embeddings.create({ model, input: "a cat", dimensions: 64 });
assert.equal(short.data[0].embedding.length, 64);

if (speechModel) {
  const asked = { model: speechModel, response_format: "verbose_json" };
  const heard = await client.audio.transcriptions.create({ file: createReadStream(clip), ...asked });
  assert.match(heard.text, /ask not what your country can do for you/);
  assert.ok(heard.segments.length > 0);
  ran.push("transcription");
}

const { version } = JSON.parse(
  readFileSync(new URL("node_modules/openai/package.json", import.meta.url)),
);
console.log(JSON.stringify({ client: "openai (Node)", version, ran }));
