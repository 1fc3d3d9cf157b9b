/* A page that was opened from a folder may not start workers. Run the worker's script in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.queue = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentDocument;
      inner.open();
      inner.write(
        "<script>function importScripts(...urls) {" +
          "return urls.reduce((done, url) => done.then(() => new Promise(next => {" +
          "const script = document.createElement('script'); script.src = url; script.onload = next;" +
          "document.body.append(script);})), Promise.resolve());}" +
          "var postMessage = data => parent.postMessage({fromWorker: true, data}, '*');" +
          "<\/script><body><script src=\"" + url + "\"><\/script>"
      );
      inner.close();
      this.frame.onload = () => {
        this.ready = true;
        this.queue.splice(0).forEach(data => this.deliver(data));
      };
      window.addEventListener("message", event => {
        if (event.source !== this.frame.contentWindow || !event.data.fromWorker) return;
        const message = new MessageEvent("message", { data: event.data.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
    }
    deliver(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
    postMessage(data) {
      if (this.ready) this.deliver(data);
      else this.queue.push(data);
    }
    terminate() {
      this.frame.remove();
    }
  };
}
