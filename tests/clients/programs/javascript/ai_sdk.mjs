// Runs the features of Vercel's AI SDK, and prints a line of JSON for each.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { z } from "zod";

const given = JSON.parse(process.argv[2]);
const address = { baseURL: `${given.url}/v1`, apiKey: given.key };
const openai = createOpenAI(address);
const compatible = createOpenAICompatible({ ...address, name: "triptych", supportsStructuredOutputs: true });
const anthropic = createAnthropic(address);
const PROVIDERS = {
  "": (name) => openai.responses(name),
  ": chat completions": (name) => openai.chat(name),
  ": compatible servers": (name) => compatible(name),
  ": anthropic": (name) => anthropic(name),
};
const LIMITS = { temperature: 0, maxOutputTokens: 100, maxRetries: 0 };
const STAY = z.object({ city: z.string(), days: z.number().int() });

async function feature(name, run) {
  try {
    const detail = await run();
    console.log(JSON.stringify({ feature: name, ok: true, detail: JSON.stringify(detail ?? "").slice(0, 200) }));
  } catch (error) {
    const detail = `${error.name}: ${error.responseBody ?? error.message}`.slice(0, 500);
    console.log(JSON.stringify({ feature: name, ok: false, detail }));
  }
}

function withTools(model) {
  const weather = tool({
    description: given.weather,
    inputSchema: z.object({ city: z.string() }),
    execute: async () => given.result,
  });
  return { ...LIMITS, model, prompt: given.asked, tools: { get_weather: weather }, stopWhen: stepCountIs(3) };
}

for (const [name, modelOf] of Object.entries(PROVIDERS)) {
  const model = modelOf(given.model);

  await feature(`chat${name}`, async () => {
    const messages = [{ role: "user", content: "Hello" }];
    const first = await generateText({ ...LIMITS, model, messages });
    assert.equal(first.text, given.hello);
    assert.ok(first.usage.outputTokens > 3);
    messages.push(...first.response.messages, { role: "user", content: "Hello" });
    return (await generateText({ ...LIMITS, model, messages })).text;
  });

  await feature(`stream${name}`, async () => {
    const pieces = [];
    for await (const piece of streamText({ ...LIMITS, model, prompt: "Hello" }).textStream) pieces.push(piece);
    assert.ok(pieces.length > 1);
    assert.equal(pieces.join(""), given.hello);
  });

  await feature(`tools${name}`, async () => {
    const whole = await generateText(withTools(model));
    assert.equal(whole.text, given.answer);
    assert.equal(await streamText(withTools(model)).text, given.answer);
    return whole.steps.length;
  });

  await feature(`structured${name}`, async () => {
    const asked = { ...LIMITS, model: modelOf("chat"), schema: STAY, prompt: "Three days in Oslo, as JSON" };
    return (await generateObject(asked)).object;
  });
}

await feature("embeddings", async () => {
  const { embeddings } = await embedMany({ model: openai.embedding("embed"), values: given.texts });
  assert.deepEqual(embeddings.map((one) => one.length), [384, 384, 384]);
});
