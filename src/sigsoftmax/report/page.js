"use strict";

(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const systemIsDark = window.matchMedia("(prefers-color-scheme: dark)");
  const paper = window.matchMedia("print");
  // A finger that drags across a plot means to scroll the page.
  const isTouch = window.matchMedia("(pointer: coarse)").matches;
  const PRINT_WIDTH = 660;
  const NARROW = 560;
  let printing = false;

  // --- theme: follows the system until the reader chooses; forgotten with the page --------------------------------

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemIsDark.matches);

  function color(reference) {
    const [name, alpha] = reference.slice(1).split("/");
    const hex = getComputedStyle(root).getPropertyValue(`--${name}`).trim();
    if (!alpha) return hex;
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${red}, ${green}, ${blue}, ${alpha})`;
  }

  // Only under names that end in "color": a text from data may begin with @ as well.
  function withColors(value, name = "") {
    if (typeof value === "string") {
      return name.toLowerCase().endsWith("color") && value.startsWith("@") ? color(value) : value;
    }
    if (Array.isArray(value)) return value.map((item) => withColors(item, name));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, withColors(item, key)]));
    }
    return value;
  }

  // --- figures ----------------------------------------------------------------------------------------------------

  class Plot {
    constructor(spec) {
      this.spec = spec;
      this.frame = document.getElementById(spec.id);
      this.place = document.getElementById(`${spec.id}-plot`);
      this.log = { x: spec.x.log, y: spec.y.log };
      this.isDrawn = false;
      this.listen();
    }

    listen() {
      this.frame.addEventListener("click", (event) => {
        const button = event.target.closest("button");
        if (!button) return;
        if (button.dataset.action === "reset") return this.reset();
        if (button.dataset.action === "save") return this.save();
        const pressed = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(pressed));
        if (button.dataset.scale) this.log[button.dataset.scale] = pressed;
        this.draw({ keepView: !button.dataset.scale });
      });
      this.frame.addEventListener("change", () => this.draw());
      this.place.addEventListener("keydown", (event) => this.onKey(event));
    }

    // Keys that are off: unpressed buttons, and every option but the chosen one.
    hiddenKeys() {
      const hidden = new Set();
      for (const button of this.frame.querySelectorAll('button[data-key][aria-pressed="false"]')) {
        hidden.add(button.dataset.key);
      }
      for (const select of this.frame.querySelectorAll("select[data-choice]")) {
        for (const option of select.options) if (!option.selected) hidden.add(option.value);
      }
      return hidden;
    }

    traces() {
      const hidden = this.hiddenKeys();
      return this.spec.traces.map(({ data, keys }) => ({
        ...withColors(data),
        visible: !keys.some((key) => hidden.has(key)),
      }));
    }

    axis(name, view) {
      const { title, settings } = this.spec[name];
      const narrow = this.width() < NARROW;
      return {
        title: { text: title, standoff: 8, font: { size: narrow ? 11 : 13, color: color("@soft-ink") } },
        type: this.log[name] ? "log" : "-",
        autorange: true,
        gridcolor: color("@grid"),
        linecolor: color("@line"),
        tickcolor: color("@line"),
        zerolinecolor: color("@line"),
        tickfont: { size: narrow ? 10 : 12, color: color("@soft-ink") },
        automargin: true,
        zeroline: false,
        nticks: narrow ? 6 : 0,
        ...(this.log[name] && !settings.tickvals ? { dtick: this.logStep(name) } : {}),
        // Written-out tick labels would crowd a linear axis.
        ...(settings.tickvals && !this.log[name] ? {} : settings),
        ...(view ?? {}),
      };
    }

    // Ticks at powers of ten, or at 1, 2 and 5 where there are few of them: `decades` of the data, or of the view.
    logStep(name, decades = this.decades(name)) {
      return decades > 12 ? 2 : decades > 3 ? 1 : decades > 1 ? "D2" : "D1";
    }

    decades(name) {
      let [low, high] = [Infinity, -Infinity];
      const hidden = this.hiddenKeys();
      for (const { data, keys } of this.spec.traces) {
        if (keys.some((key) => hidden.has(key))) continue;
        for (const value of data[name]) {
          if (value > 0) [low, high] = [Math.min(low, value), Math.max(high, value)];
        }
      }
      return high > low ? Math.log10(high / low) : 1;
    }

    // After a zoom the step may be too coarse or too fine.
    fitTicks() {
      const change = {};
      for (const name of ["x", "y"]) {
        const axis = this.place._fullLayout[`${name}axis`];
        if (axis.type !== "log" || this.spec[name].settings.tickvals) continue;
        const step = this.logStep(name, Math.abs(axis.range[1] - axis.range[0]));
        if (step !== axis.dtick) change[`${name}axis.dtick`] = step;
      }
      if (Object.keys(change).length) Plotly.relayout(this.place, change);
    }

    width() {
      return printing ? PRINT_WIDTH : this.place.clientWidth;
    }

    layout(views) {
      const own = withColors({ ...this.spec.layout, ...(this.width() < NARROW ? this.spec.narrow : {}) });
      return {
        paper_bgcolor: color("@card"),
        plot_bgcolor: color("@card"),
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("@ink") },
        margin: { l: 8, r: 12, t: 10, b: 8 },
        showlegend: false,
        hovermode: "closest",
        hoverlabel: {
          bgcolor: color("@sunken"),
          bordercolor: color("@line"),
          font: { color: color("@ink"), size: 12 },
          align: "left",
          namelength: -1,
        },
        dragmode: isTouch ? false : "zoom",
        ...own,
        width: this.width(),
        height: this.spec.height,
        xaxis: this.axis("x", views?.x),
        yaxis: this.axis("y", views?.y),
      };
    }

    // What the reader has zoomed to.
    view(name) {
      const axis = this.place._fullLayout?.[`${name}axis`];
      return axis && !axis.autorange ? { autorange: false, range: [...axis.range] } : undefined;
    }

    draw({ keepView = false } = {}) {
      if (!this.width()) return;
      const views = keepView && this.isDrawn ? { x: this.view("x"), y: this.view("y") } : undefined;
      const first = !this.isDrawn;
      this.isDrawn = true;
      this.place.classList.add("drawn");
      Plotly.react(this.place, this.traces(), this.layout(views), { displayModeBar: false, scrollZoom: false });
      if (first) this.place.on("plotly_relayout", () => this.fitTicks());
      if (views) this.fitTicks();
    }

    reset() {
      this.draw();
    }

    save() {
      const { width, height } = this.place._fullLayout;
      Plotly.downloadImage(this.place, { format: "svg", filename: this.spec.id, width, height });
    }

    onKey(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.place) return;
      const moves = { ArrowLeft: ["xaxis", -1], ArrowRight: ["xaxis", 1], ArrowDown: ["yaxis", -1], ArrowUp: ["yaxis", 1] };
      const zooms = { "+": 0.8, "=": 0.8, "-": 1.25, "_": 1.25 };
      const change = {};
      const axes = ["xaxis", "yaxis"].filter((name) => !this.place._fullLayout[name].fixedrange);
      if (moves[event.key]) {
        const [name, direction] = moves[event.key];
        if (!axes.includes(name)) return;
        const [low, high] = this.place._fullLayout[name].range;
        const step = 0.15 * (high - low) * direction * (low > high ? -1 : 1);
        change[`${name}.range`] = [low + step, high + step];
      } else if (zooms[event.key]) {
        for (const name of axes) {
          const [low, high] = this.place._fullLayout[name].range;
          const [middle, half] = [(low + high) / 2, ((high - low) / 2) * zooms[event.key]];
          change[`${name}.range`] = [middle - half, middle + half];
        }
      } else if (event.key === "0") {
        this.reset();
      } else {
        return;
      }
      event.preventDefault();
      if (Object.keys(change).length) Plotly.relayout(this.place, change);
    }
  }

  const plots = figures.map((spec) => new Plot(spec));
  const drawAll = () => plots.filter((plot) => plot.isDrawn).forEach((plot) => plot.draw({ keepView: true }));

  // One after the other, so that the page answers meanwhile.
  function drawNext() {
    const next = plots.find((plot) => !plot.isDrawn);
    if (!next) return void (root.dataset.drawn = "all");
    next.draw();
    setTimeout(drawNext);
  }

  let timer;
  let lastWidth = root.clientWidth;
  window.addEventListener("resize", () => {
    // On phones the height changes whenever the address bar hides.
    if (root.clientWidth === lastWidth || printing) return;
    lastWidth = root.clientWidth;
    clearTimeout(timer);
    timer = setTimeout(drawAll, 120);
  });

  // --- the theme's button -----------------------------------------------------------------------------------------

  const themeButton = document.getElementById("theme");
  const showTheme = () => {
    themeButton.setAttribute("aria-pressed", String(isDark()));
    drawAll();
  };
  themeButton.hidden = false;
  themeButton.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  systemIsDark.addEventListener("change", showTheme);

  // --- paper: light, as wide as a page, all of it -----------------------------------------------------------------

  let themeBefore;
  function toPaper() {
    if (printing) return;
    printing = true;
    themeBefore = root.dataset.theme;
    root.dataset.theme = "light";
    plots.forEach((plot) => plot.draw());
  }
  function toScreen() {
    if (!printing) return;
    printing = false;
    if (themeBefore) root.dataset.theme = themeBefore;
    else delete root.dataset.theme;
    drawAll();
  }
  window.addEventListener("beforeprint", toPaper);
  window.addEventListener("afterprint", toScreen);
  paper.addEventListener("change", () => (paper.matches ? toPaper() : toScreen()));

  // --- contents: where the reader is ------------------------------------------------------------------------------

  const links = new Map([...document.querySelectorAll("nav ol a")].map((link) => [link.hash.slice(1), link]));
  const seen = new Set();
  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) entry.isIntersecting ? seen.add(entry.target.id) : seen.delete(entry.target.id);
      const here = [...links.keys()].find((id) => seen.has(id));
      for (const [id, link] of links) {
        if (id === here) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    },
    { rootMargin: "-10% 0px -60% 0px" },
  );
  document.querySelectorAll(".sections > section").forEach((section) => watcher.observe(section));

  showTheme();
  drawNext();
})();
