// npm's @anthropic-ai/sdk: messages, the stream helper, count_tokens, tools, typed errors.
import assert from "node:assert/strict";
import Anthropic, { BadRequestError, NotFoundError } from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is thermocline?" }];

const whole = await client.messages.create({ model, messages, max_tokens: 100 });
assert.match(whole.content[0].text, /mixture-of-experts/);
assert.equal(whole.stop_reason, "end_turn");
const final = await client.messages.stream({ model, messages, max_tokens: 100 }).finalMessage();
assert.deepEqual(final.content, whole.content);
const counted = await client.messages.countTokens({ model, messages });
assert.equal(counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);

const tools = [
  {
    name: "add",
    input_schema: {
      type: "object",
      properties: { a: { type: "integer", minimum: 0, maximum: 9 } },
      required: ["a"],
      additionalProperties: false,
    },
  },
];
const asked = { model, messages, tools, tool_choice: { type: "any" }, max_tokens: 100 };
for (const message of [
  await client.messages.create(asked),
  await client.messages.stream(asked).finalMessage(),
]) {
  const call = message.content.find((block) => block.type === "tool_use");
  assert.equal(message.stop_reason, "tool_use");
  assert.equal(call.name, "add");
  assert.ok(Number.isInteger(call.input.a));
}

await assert.rejects(
  client.messages.create({ model: "other", messages, max_tokens: 5 }),
  NotFoundError,
);
await assert.rejects(
  client.messages.create({ model, messages: [], max_tokens: 5 }),
  BadRequestError,
);
