// npm's openai: chats and responses, whole and streamed, tools, a schema, typed errors.
import assert from "node:assert/strict";
import OpenAI, { BadRequestError, NotFoundError } from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const question = "What is thermocline?";
const messages = [{ role: "user", content: question }];
const add = {
  name: "add",
  description: "Adds.",
  parameters: {
    type: "object",
    properties: { a: { type: "integer", minimum: 0, maximum: 9 } },
    required: ["a"],
    additionalProperties: false,
  },
  strict: true,
};

const whole = await client.chat.completions.create({ model, messages, max_tokens: 100 });
const text = whole.choices[0].message.content;
assert.match(text, /mixture-of-experts/);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ model, messages, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, text);

const response = await client.responses.create({ model, input: question });
assert.equal(response.output_text, text);
const stream = client.responses.stream({ model, input: question });
assert.equal((await stream.finalResponse()).output_text, text);

const called = await client.chat.completions.create({
  model,
  messages,
  tools: [{ type: "function", function: add }],
  tool_choice: "required",
  max_tokens: 100,
});
const call = called.choices[0].message.tool_calls[0];
assert.equal(call.function.name, "add");
assert.ok(Number.isInteger(JSON.parse(call.function.arguments).a));

const asked = await client.responses.create({
  model,
  input: question,
  tools: [{ type: "function", ...add }],
  tool_choice: { type: "function", name: "add" },
  max_output_tokens: 100,
});
const item = asked.output.find((found) => found.type === "function_call");
assert.ok(Number.isInteger(JSON.parse(item.arguments).a));

await assert.rejects(client.models.retrieve("other"), NotFoundError);
await assert.rejects(
  client.responses.create({ model, input: question, previous_response_id: "resp_1" }),
  BadRequestError,
);
