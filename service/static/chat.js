// ---- Chat -------------------------------------------------------------------------------------------------------

const SAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Tell the weather in a place.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];
const chats = new Map(); // from a model's name to its conversation: messages as in the API
let answering = null; // the AbortController of the current reply

const conversation = () => chats.get(model.name) ?? chats.set(model.name, []).get(model.name);

/** Return the messages without what a stopped reply lacks, and with the instruction first. */
function sentMessages() {
  const system = $("system").value.trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...conversation().map(({ usage, ...message }) => message)];
}

function chatBody(messages = sentMessages()) {
  const body = { model: model.name, messages };
  for (const field of $("chat-controls").querySelectorAll("input[type=text]")) {
    const text = field.value.trim();
    if (text) body[field.name] = numberOf(text);
  }
  if ($("tools").value.trim()) body.tools = toolsOf($("tools").value);
  return { ...body, stream: true, stream_options: { include_usage: true } };
}

/** Return the tools as JSON; text that is no JSON goes as it is, and the service refuses it by name. */
function toolsOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function send() {
  const text = $("message").value;
  if (answering || !(text.trim() || attached.length)) return;
  conversation().push({ role: "user", content: contentOf(text) });
  $("message").value = "";
  attached = [];
  drawAttached();
  drawTurns();
  answer();
}

/** Ask for the next turn, and show it as it comes. */
async function answer() {
  clearError();
  const asked = model;
  const turns = conversation();
  const body = chatBody();
  const reply = { role: "assistant", content: "" };
  turns.push(reply);
  const view = turnView(reply, turns.length - 1);
  $("turns").append(view.root);
  const since = performance.now();
  const controller = replying(new AbortController(), view);
  let reason = "";
  try {
    for await (const event of events(await ask("v1/chat/completions", body, controller.signal))) {
      const [choice] = event.choices;
      if (event.usage) reply.usage = event.usage;
      if (choice?.delta) addDelta(reply, choice.delta, view);
      reason = choice?.finish_reason ?? reason;
    }
    showReply(reply, reason, since);
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (!stopped && !reply.content && !reply.tool_calls) turns.pop();
    if (asked !== model) return;
    if (turns.at(-1)?.role === "user") takeBack(turns);
    showFacts($("chat-facts"), make("b", {}, stopped ? "stopped" : "failed"), seconds(performance.now() - since));
    say(stopped ? "stopped" : "failed");
    if (!stopped) showError(error);
  } finally {
    if (answering === controller) replying(null, view);
    if (asked === model) drawTurns();
  }
}

/** Put the last message back where it was written, to be changed and sent again, unless another one has been begun. */
function takeBack(turns) {
  if ($("message").value.trim() || attached.length) return;
  const { content } = turns.pop();
  $("message").value = textOf(content);
  attached = urlsOf(content);
  drawAttached();
}

/** Add a part of the reply to the message and to what is shown. */
function addDelta(reply, delta, view) {
  const follow = $("turns").scrollHeight - $("turns").scrollTop - $("turns").clientHeight < 40;
  if (delta.reasoning_content) {
    reply.reasoning_content = (reply.reasoning_content ?? "") + delta.reasoning_content;
    view.thought.textContent = reply.reasoning_content;
    view.folded.hidden = false;
    view.folded.open = true;
  }
  if (delta.content) {
    reply.content += delta.content;
    view.folded.open = false;
    view.said.append(delta.content);
  }
  for (const part of delta.tool_calls ?? []) {
    const calls = (reply.tool_calls ??= []);
    const call = (calls[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
    view.calls.replaceChildren(...calls.map((one) => callView(one)));
  }
  if (follow) $("turns").scrollTop = $("turns").scrollHeight;
}

function showReply(reply, reason, since) {
  const spent = performance.now() - since;
  const { prompt_tokens: read, completion_tokens: written } = reply.usage ?? {};
  const rate = written > 1 && `${((written * 1000) / spent).toFixed(0)} tokens/s`;
  showFacts($("chat-facts"), make("b", {}, reason), read && `${count.format(read)} in, ${tokens(written)} out`, `total ${seconds(spent)}`, rate);
  say(reply.content || `finished: ${reason}`);
}

const ROLES = { user: "You", assistant: "Model", tool: "Result", system: "Instruction" };

/** Return the elements of a turn, empty for one that is being written. */
function turnView(message, at) {
  const said = make("div", { className: "said" }, textOf(message.content));
  const thought = make("div", { className: "thought" }, message.reasoning_content ?? "");
  const folded = make("details", { hidden: !message.reasoning_content }, make("summary", {}, "Reasoning"), thought);
  const calls = make("div", {}, ...(message.tool_calls ?? []).map((one) => callView(one)));
  const root = make("article", { className: "turn" }, make("h2", {}, ROLES[message.role]), folded, picturesView(message.content), said, calls);
  said.hidden = message.role === "user" && !said.textContent;
  root.dataset.role = message.role;
  root.dataset.at = at;
  return { root, said, thought, folded, calls };
}

function callView(call) {
  const given = make("pre", { tabIndex: 0 }, call.function.arguments);
  return make("div", { className: "call" }, "calls ", make("code", {}, call.function.name), given);
}

/** Show the conversation, with what can be done with its last turn. */
function drawTurns() {
  const turns = conversation();
  const views = turns.map(turnView);
  views.forEach(({ root }, at) => {
    const role = turns[at].role, content = textOf(turns[at].content);
    const acts = [content && role !== "tool" && copyButton(() => content)];
    if (at === turns.length - 1 && role === "assistant") acts.push(actButton("Regenerate", regenerate));
    root.append(make("div", { className: "acts" }, ...acts.filter(Boolean)));
  });
  const last = turns.at(-1);
  if (last?.tool_calls) views.at(-1).root.append(resultsView(last.tool_calls));
  $("turns").replaceChildren(...(views.length ? views.map(({ root }) => root) : [make("p", {}, "Say something to the model.")]));
  $("turns").scrollTop = $("turns").scrollHeight;
  refreshChat();
}

/** Return fields for the results of a reply's calls. */
function resultsView(calls) {
  const fields = calls.map((call) => make("textarea", { rows: 2, spellcheck: false, ariaLabel: `Result of ${call.function.name}` }));
  const labels = calls.map((call, at) => make("label", {}, `Result of ${call.function.name}`, fields[at]));
  const ready = actButton("Send results", () => {
    if (answering) return;
    calls.forEach((call, at) => conversation().push({ role: "tool", tool_call_id: call.id, content: fields[at].value }));
    drawTurns();
    answer();
  });
  return make("div", { className: "call" }, ...labels, make("div", { className: "acts" }, ready));
}

function actButton(text, act) {
  const button = make("button", { type: "button", className: "quiet" }, text);
  button.addEventListener("click", act);
  return button;
}

/** Drop the last reply and ask again. */
function regenerate() {
  if (answering) return;
  conversation().pop();
  drawTurns();
  answer();
}

/** Return a button that copies a text; its label tells for a moment that it did. */
function copyButton(text) {
  const button = actButton("Copy", async () => {
    await copy(text());
    button.textContent = "Copied";
    say("copied");
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

/** Copy a text. Browsers have no clipboard for pages over plain HTTP of another machine; a selection works there. */
async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const field = make("textarea", { value: text, className: "unseen" });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** Show that a reply is being written, or (null) none; returns its controller. */
function replying(controller, view) {
  answering = controller;
  $("send").disabled = Boolean(controller);
  $("chat-stop").disabled = !controller;
  view.root.setAttribute("aria-busy", String(Boolean(controller)));
  return controller;
}

function newChat() {
  answering?.abort();
  chats.set(model.name, []);
  showFacts($("chat-facts"));
  drawTurns();
  $("message").focus();
}

/** Show the request that sends what is written, or the last one. */
function refreshChat() {
  const text = $("message").value || model.capabilities.find((one) => one.name === "chat").body.messages[0].content;
  const turns = sentMessages();
  const waits = turns.at(-1)?.role === "user" || turns.at(-1)?.role === "tool";
  const body = chatBody(waits ? turns : [...turns, { role: "user", content: contentOf(text) }]);
  $("chat-curl").textContent = withFiles(curlOf(body, "v1/chat/completions"));
}

function openChat() {
  const own = model.sampling_defaults;
  for (const field of $("chat-controls").querySelectorAll("input[type=text]")) field.placeholder = String(own[field.name] ?? field.dataset.usual);
  $("with-tools").hidden = !model.chat?.tools;
  openPictures();
  const { temperature, messages: [{ content: example }] } = model.capabilities.find((one) => one.name === "chat").body;
  const field = $("chat").elements.namedItem("temperature");
  if (!field.value && temperature !== undefined) field.value = temperature;
  $("chat-examples").replaceChildren(actButton(example, () => { $("message").value = example; $("message").focus(); refreshChat(); }));
  drawTurns();
}

function listenToChat() {
  listenToPictures();
  $("chat").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("chat").addEventListener("input", refreshChat);
  $("chat-stop").addEventListener("click", () => answering?.abort());
  $("chat-new").addEventListener("click", newChat);
  $("sample-tools").addEventListener("click", () => { $("tools").value = JSON.stringify(SAMPLE_TOOLS, null, 1); refreshChat(); });
  $("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.ctrlKey || event.metaKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
}
