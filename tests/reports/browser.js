// See browser.py. Chromium's own console cannot be read from here, so the page is loaded twice: as
// a file, for the script to work on, and written into a frame whose errors are listened to.
window.kaleido_scopes = {
  async plotly({ page, script }) {
    const frame = () => {
      const made = document.createElement("iframe");
      made.width = 1200;
      made.height = 900;
      document.body.append(made);
      return made;
    };
    try {
      const opened = frame();
      await new Promise((done) => {
        opened.onload = done;
        opened.src = page;
      });
      const text = await new Promise((done, fail) => {
        const request = new XMLHttpRequest();
        request.onload = () => done(request.responseText);
        request.onerror = () => fail(new Error(`${page} cannot be read`));
        request.open("GET", page);
        request.send();
      });
      const listened = frame().contentWindow;
      const told = [];
      listened.document.open();
      listened.addEventListener("error", ({ message }) => told.push(`error: ${message}`), true);
      listened.document.addEventListener("securitypolicyviolation", ({ blockedURI }) =>
        told.push(`policy: ${blockedURI}`),
      );
      for (const level of ["error", "warn"]) {
        listened.console[level] = (...words) => told.push(`${level}: ${words.join(" ")}`);
      }
      const loaded = new Promise((done) => listened.addEventListener("load", done));
      listened.document.write(text);
      listened.document.close();
      await loaded;
      const requests = [opened.contentWindow, listened].flatMap((window) =>
        window.performance.getEntriesByType("resource").map(({ name }) => name),
      );
      const value = await new Function("window", script)(opened.contentWindow);
      return {
        code: 0,
        message: "",
        result: { value, told, requests, url: opened.contentWindow.location.href },
      };
    } catch (error) {
      return { code: 1, message: `${error}\n${error.stack}`, result: null };
    }
  },
};
