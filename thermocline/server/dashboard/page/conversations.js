"use strict";
// Conversations that this browser keeps, one entry of its storage each; the newest ones stay. Knows no element.

const CHAT_PREFIX = "thermocline-chat:";
const OPEN_CHAT = "thermocline-open-chat";
const KEEPS_NOTHING = "thermocline-keeps-no-chats";
const MAX_CHATS = 30;

class Conversations {
  get isKeeping() {
    try {
      return localStorage.getItem(KEEPS_NOTHING) === null;
    } catch {
      return false; // a browser that keeps nothing
    }
  }

  // What is kept goes when nothing is to be kept any more.
  setKeeping(isKeeping) {
    try {
      if (isKeeping) {
        localStorage.removeItem(KEEPS_NOTHING);
        return;
      }
      localStorage.setItem(KEEPS_NOTHING, "1");
      for (const chat of this.list()) this.remove(chat.id);
      this.setOpened(null);
    } catch {
      // a browser that keeps nothing
    }
  }

  // Newest first: { id, title, at }.
  list() {
    const found = [];
    try {
      for (let index = 0; index < localStorage.length; index++) {
        const name = localStorage.key(index);
        const chat = name.startsWith(CHAT_PREFIX) ? this.load(name.slice(CHAT_PREFIX.length)) : null;
        if (chat) found.push({ id: chat.id, title: chat.title, at: chat.at });
      }
    } catch {
      return []; // a browser that keeps nothing
    }
    return found.sort((a, b) => b.at - a.at);
  }

  // The conversation of that name, null where there is none, or one of no use.
  load(id) {
    try {
      const chat = JSON.parse(localStorage.getItem(CHAT_PREFIX + id));
      const isText = (message) => typeof message.content === "string" && ["user", "assistant"].includes(message.role);
      if (!chat || !Array.isArray(chat.messages) || !chat.messages.every(isText)) return null;
      return { id, title: String(chat.title), at: Number(chat.at), system: String(chat.system ?? ""), messages: chat.messages };
    } catch {
      return null;
    }
  }

  // Whether it is kept now; older ones make room.
  save(chat) {
    const { id, ...rest } = chat;
    const older = this.list().filter((each) => each.id !== id);
    for (const each of older.splice(MAX_CHATS - 1)) this.remove(each.id);
    for (;;) {
      try {
        localStorage.setItem(CHAT_PREFIX + id, JSON.stringify(rest));
        sessionStorage.setItem(OPEN_CHAT, id);
        return true;
      } catch {
        const oldest = older.pop();
        if (!oldest) return false;
        this.remove(oldest.id);
      }
    }
  }

  remove(id) {
    try {
      localStorage.removeItem(CHAT_PREFIX + id);
    } catch {
      // a browser that keeps nothing
    }
  }

  // The conversation that this tab showed last, null for none.
  opened() {
    try {
      const id = sessionStorage.getItem(OPEN_CHAT);
      return id === null ? null : this.load(id);
    } catch {
      return null;
    }
  }

  setOpened(id) {
    try {
      if (id === null) sessionStorage.removeItem(OPEN_CHAT);
      else sessionStorage.setItem(OPEN_CHAT, id);
    } catch {
      // a browser that keeps nothing
    }
  }
}

function newChatId() {
  return Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
}
