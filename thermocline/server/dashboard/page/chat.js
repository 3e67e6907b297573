"use strict";
// The conversation: sends it, shows the answer as it comes, stops it, keeps it. Whatever a model writes is shown as text.

class Chat {
  constructor(trace) {
    this.trace = trace;
    this.byId = (id) => document.getElementById(id);
    this.store = new Conversations();
    this.id = newChatId();
    this.messages = [];
    this.running = null;
    this.answer = null;
    this.isReady = false;
    const prompt = this.byId("prompt");
    this.byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    prompt.addEventListener("input", () => this.fit());
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.byId("stop").addEventListener("click", () => this.stop());
    this.byId("clear").addEventListener("click", () => this.open(null));
    this.byId("remove").addEventListener("click", () => this.remove());
    this.byId("chats").addEventListener("change", (event) => this.open(this.store.load(event.target.value)));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    const keeping = this.byId("keep");
    keeping.checked = this.store.isKeeping;
    keeping.addEventListener("change", () => {
      this.store.setKeeping(keeping.checked);
      this.keep();
      this.listChats();
    });
    window.addEventListener("pagehide", () => this.keep());
    const log = this.byId("log");
    this.follows = true;
    log.addEventListener("scroll", () => { this.follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40; });
    new ResizeObserver(() => this.keepInView(() => {})).observe(log);
    this.open(this.store.opened(), false);
    this.update();
  }

  setReady(isReady) {
    if (this.isReady === isReady) return;
    this.isReady = isReady;
    this.update();
  }

  update() {
    const isRunning = this.running !== null;
    const hadFocus = [this.byId("send"), this.byId("stop")].includes(document.activeElement);
    this.byId("send").hidden = isRunning;
    this.byId("send").disabled = !this.isReady;
    this.byId("stop").hidden = !isRunning;
    this.byId("log").setAttribute("aria-busy", isRunning);
    if (hadFocus) this.byId(isRunning ? "stop" : "prompt").focus();
  }

  fit() {
    const prompt = this.byId("prompt");
    prompt.style.height = "auto";
    prompt.style.height = `${prompt.scrollHeight + 2}px`;
  }

  stop() {
    this.running?.abort();
  }

  // Shows a kept conversation, or an empty one for null; an answer that is under way is stopped, and kept.
  open(chat, hasFocus = true) {
    this.keep();
    this.stop();
    this.id = chat?.id ?? newChatId();
    this.messages = chat?.messages ?? [];
    this.store.setOpened(chat?.id ?? null);
    this.byId("log").replaceChildren(...(this.messages.length ? [] : [this.empty()]));
    this.follows = true;
    this.byId("system").value = chat?.system ?? (chat === null ? this.byId("system").value : "");
    for (const message of this.messages) this.showKept(message);
    this.showLast(this.messages.findLast((message) => message.about?.includes("/s"))?.about ?? "");
    this.listChats();
    if (hasFocus) this.byId("prompt").focus();
  }

  empty() {
    return element("p", { id: "empty" }, "Ask something. What the model writes appears here as it is made, and the rest of the page shows what the machine does for it.");
  }

  showKept(message) {
    const shown = this.add(message.role);
    shown.node.classList.remove("busy");
    if (message.reasoning) shown.think(message.reasoning);
    shown.view?.push(message.content);
    shown.finish(message.content);
    if (shown.about) this.keepInView(() => { shown.about.textContent = message.about ?? ""; });
  }

  // What was said so far goes to the browser's storage, with the part of an answer that has arrived.
  keep() {
    const said = this.answer?.content ? [...this.messages, { ...this.answer.asMessage(), about: "stopped" }] : this.messages;
    if (!said.length || !this.store.isKeeping) return;
    const title = said[0].content.replace(/\s+/g, " ").slice(0, 60);
    const isKept = this.store.save({ id: this.id, title, at: Date.now(), system: this.byId("system").value, messages: said });
    if (!isKept) this.announce("This browser does not keep the conversation.");
  }

  remove() {
    const id = this.id;
    this.stop();
    this.messages = [];
    this.answer = null;
    this.store.remove(id);
    this.open(null);
  }

  listChats() {
    const chats = this.store.list();
    const isOpen = chats.some((chat) => chat.id === this.id);
    const options = chats.map((chat) => element("option", { value: chat.id }, chat.title));
    if (!isOpen) options.unshift(element("option", { value: "" }, "Earlier chats"));
    this.byId("chats").replaceChildren(...options);
    this.byId("chats").value = isOpen ? this.id : "";
    this.byId("chats").hidden = !chats.length;
    this.byId("remove").hidden = !isOpen;
  }

  async send() {
    const prompt = this.byId("prompt");
    const text = prompt.value.trim();
    if (!text || this.running || !this.isReady) return;
    prompt.value = "";
    this.fit();
    this.byId("empty")?.remove();
    this.messages.push({ role: "user", content: text });
    this.follows = true;
    this.add("user").finish(text);
    const messages = this.messages;
    const answer = this.answer = this.add("assistant");
    const running = this.running = new AbortController();
    this.update();
    const isRecording = this.byId("record").checked && await this.trace.start();
    try {
      await this.stream(answer, running.signal);
    } finally {
      answer.node.classList.remove("busy");
      answer.finish(answer.content);
      this.running = this.answer = null;
      this.update();
      if (this.messages === messages) {
        if (answer.content) this.messages.push(answer.asMessage());
        else this.takeBack(text);
        this.keep();
        this.listChats();
      }
      if (isRecording) this.trace.stop(!answer.hasFailed);
    }
  }

  // A question without any answer goes back to where it can be sent again.
  takeBack(text) {
    this.messages.pop();
    const prompt = this.byId("prompt");
    if (!prompt.value) prompt.value = text;
    this.fit();
  }

  body() {
    const system = this.byId("system").value.trim();
    const head = system ? [{ role: "system", content: system }] : [];
    const said = this.messages.map(({ role, content }) => ({ role, content }));
    const body = { messages: [...head, ...said], stream: true, return_progress: true };
    const [temperature, longest] = [this.byId("temperature"), this.byId("max-tokens")];
    if (temperature.value !== "" && temperature.validity.valid) body.temperature = temperature.valueAsNumber;
    if (longest.value !== "" && longest.validity.valid) body.max_completion_tokens = longest.valueAsNumber;
    return body;
  }

  async stream(answer, signal) {
    const say = (text, isWrong) => {
      answer.about.textContent = text;
      answer.about.classList.toggle("wrong", Boolean(isWrong));
      answer.hasFailed = Boolean(isWrong);
    };
    say("waiting");
    try {
      const response = await request("/v1/chat/completions", { method: "POST", body: this.body(), signal });
      for await (const chunk of readEvents(response)) {
        if (chunk.error) throw new ServerError(0, chunk.error.message);
        this.take(answer, chunk, say);
      }
      this.announce("The answer is complete.");
    } catch (error) {
      if (signal.aborted) {
        say("stopped");
        this.announce("Stopped.");
        return;
      }
      const why = error instanceof ServerError ? error.message : "the server has gone away";
      say(why, true);
      this.announce(why);
    }
  }

  take(answer, chunk, say) {
    const progress = chunk.prompt_progress;
    if (progress && !answer.content) say(`reading the prompt: ${progress.processed} of ${progress.total} tokens`);
    const delta = chunk.choices?.[0]?.delta ?? {};
    if (delta.reasoning_content) answer.think(delta.reasoning_content);
    if (delta.content) {
      if (!answer.content) say("");
      answer.content += delta.content;
      answer.view.push(delta.content);
    }
    const timings = chunk.timings;
    if (timings) {
      const first = timings.ttft_ms === undefined ? "" : `, first after ${formatTime(timings.ttft_ms * 1e6)}`;
      say(`${timings.predicted_n} tokens at ${formatSpeed(timings.predicted_per_second)}/s${first}`);
      this.showLast(answer.about.textContent);
    }
  }

  // The last answer's speed stays when the machine rests.
  showLast(about) {
    this.byId("last").textContent = about ? `Last answer: ${about}` : "";
  }

  // Follows the text's end, unless the reader has scrolled away from it.
  keepInView(change) {
    change();
    const log = this.byId("log");
    if (this.follows) log.scrollTop = log.scrollHeight;
  }

  announce(text) {
    this.byId("announce").textContent = text;
  }

  add(role) {
    const text = element("div", { class: "text" });
    const node = element("article", { class: `message ${role}` }, element("h3", {}, role === "user" ? "You" : "Model"), text);
    this.byId("log").append(node);
    if (role === "user") {
      return { node, finish: (content) => this.keepInView(() => { text.textContent = content; }) };
    }
    node.classList.add("busy");
    const about = element("p", { class: "about" });
    const shown = { node, about, view: new MarkdownView(text), content: "", reasoning: "", hasFailed: false };
    shown.view.beforeChange = (change) => this.keepInView(change);
    const foot = element("div", { class: "foot" }, about);
    node.append(foot);
    let thoughts = null;
    shown.think = (more) => {
      if (!thoughts) {
        thoughts = document.createTextNode("");
        node.insertBefore(element("details", {}, element("summary", {}, "Reasoning"), element("div", { class: "thoughts" }, thoughts)), text);
      }
      shown.reasoning += more;
      this.keepInView(() => thoughts.appendData(more));
    };
    shown.finish = (content) => {
      shown.content = content;
      shown.view.finish();
      if (content && !foot.querySelector(".copy")) this.keepInView(() => foot.append(copyButton(() => shown.content)));
    };
    shown.asMessage = () => ({ role: "assistant", content: shown.content, ...(shown.reasoning && { reasoning: shown.reasoning }), about: about.textContent });
    this.keepInView(() => {});
    return shown;
  }
}
