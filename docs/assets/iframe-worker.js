// The theme searches in a web worker, and a browser starts none for a page that was opened from a disk (file://).
// There, and only there, this takes its place: the worker's program runs in a hidden frame of the page. The theme looks
// for the name IFrameWorker. Its plugin `offline` would fetch such a program from the network, if it found none here.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve, reject) => {
        const program = inside.document.createElement("script");
        program.onload = () => resolve(inside);
        program.onerror = () => reject(new Error(`the search cannot be read from ${address}`));
        program.src = address;
        inside.document.body.append(program);
      });
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {}
  };
  window.Worker = window.IFrameWorker;
}
