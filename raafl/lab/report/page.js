// Draws the charts of a report; their tables are in the page without it.
"use strict";
(async () => {
  const root = document.documentElement;
  const read = (id) => document.getElementById(id).textContent;
  const charts = JSON.parse(read("charts"));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches;
  const scales = { light: [[0, "#eef1f8"], [1, "#2f57c4"]], dark: [[0, "#22262f"], [1, "#8fb0ff"]] };

  async function inflate(text) {
    const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  function merged(base, more) {
    const both = { ...base };
    for (const [name, value] of Object.entries(more)) {
      const deep = value && typeof value === "object" && !Array.isArray(value) && base[name];
      both[name] = deep ? merged(base[name], value) : value;
    }
    return both;
  }

  function themed(view, height, width) {
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue("--" + name).trim();
    const narrow = width < 600;
    const axis = {
      gridcolor: colour("line"), linecolor: colour("line"), zerolinecolor: colour("line"), automargin: true,
      title: { font: { size: narrow ? 12 : 13 } }, tickfont: { size: narrow ? 10 : 12 },
    };
    const named = view.data.filter((trace) => trace.showlegend !== false).length;
    const layout = merged({
      height, margin: { l: 48, r: 20, t: 12, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("text"), family: getComputedStyle(document.body).fontFamily, size: 12 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("accent") },
      legend: { traceorder: "normal", orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: narrow ? 11 : 12 } },
      hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("text") }, align: "left" },
      hovermode: "closest", showlegend: named > 1,
      dragmode: coarse ? false : "zoom", xaxis: axis, yaxis: axis,
      colorway: ["#4269d0", "#e8684a", "#3ca951", "#c98a00", "#a463f2", "#d6588f", "#2f9fb5", "#9c6b4e", "#7f7f7f", "#97a600"],
    }, view.layout);
    if (narrow && named > 2) layout.height += 18 * named;
    const data = view.data.map((trace) => {
      if (trace.colorscale !== "theme") return trace;
      const bar = { ...trace.colorbar, tickfont: { color: colour("text") } };
      if (narrow) Object.assign(bar, { orientation: "h", y: 1.02, yanchor: "bottom", len: 1 });
      return { ...trace, colorscale: scales[dark.matches ? "dark" : "light"], colorbar: bar };
    });
    return [data, layout];
  }

  function chosen(figure) {
    return [...figure.querySelectorAll("select")].map((select) => select.value);
  }

  function draw(figure, chart) {
    const key = chosen(figure);
    const view = chart.views.find((one) => one.key.every((part, i) => part === key[i]));
    const place = figure.querySelector(".chart");
    const missing = figure.querySelector(".missing");
    missing.hidden = Boolean(view);
    place.hidden = !view;
    if (!view) return undefined;
    const [data, layout] = themed(view, chart.height, place.clientWidth);
    return Plotly.react(place, data, layout, {
      responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"],
      displayModeBar: matchMedia("(hover: hover)").matches && !coarse ? "hover" : false,
    });
  }

  try {
    const script = document.createElement("script");
    script.textContent = await inflate(read("plotly"));
    document.head.append(script);
    script.remove();
    const figures = [...document.querySelectorAll("figure[data-chart]")].map((figure) => [figure, charts[figure.dataset.chart]]);
    const drawAll = async () => {
      for (const [figure, chart] of figures) await draw(figure, chart);
    };
    for (const [figure, chart] of figures) {
      for (const select of figure.querySelectorAll("select")) select.addEventListener("change", () => draw(figure, chart));
    }
    await drawAll();
    dark.addEventListener("change", drawAll);
    root.dataset.drawn = String(figures.length);
  } catch (error) {
    root.dataset.failed = String(error);
    for (const place of document.querySelectorAll(".chart")) {
      place.textContent = "This browser cannot draw the chart; its table is below.";
      place.classList.add("failed");
    }
  }
})();
