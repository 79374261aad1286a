// Search without a server. A page opened from the disk may not start a Worker, so the theme's search runs in a hidden
// frame instead. Only for file: pages; on a server the browser's own Worker is used.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc =
        "<script>" +
        "postMessage = (data) => parent.postMessage(data, '*');" +
        "importScripts = (...urls) => Promise.all(urls.map((url) => new Promise((resolve, reject) => {" +
        "  const script = document.createElement('script');" +
        "  Object.assign(script, { src: new URL(url, base), onload: resolve, onerror: reject });" +
        "  document.head.append(script); })));" +
        `const base = ${JSON.stringify(new URL(url, document.baseURI).href)};` +
        `<\/script><script src=${JSON.stringify(new URL(url, document.baseURI).href)}><\/script>`;
      this.started = new Promise((resolve) => frame.addEventListener("load", resolve));
      this.frame = frame;
      window.addEventListener("message", (event) => {
        if (event.source !== frame.contentWindow) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      document.body.append(frame);
    }

    async postMessage(data) {
      await this.started;
      // Dispatched, not posted: inside the frame `postMessage` speaks to this page.
      const { contentWindow } = this.frame;
      contentWindow.dispatchEvent(new contentWindow.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
